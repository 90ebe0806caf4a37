"""Mirrors of what exchange.c and its operators take; see structures.py."""

import ctypes
from typing import ClassVar

from models.kernels.cpu.structures import Arguments

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class Exchange(ctypes.Structure):
    """`struct exchange`: a replica's place among those that share memory."""

    _fields_: ClassVar = [
        ("memory", _POINTER),
        ("replica", _INTEGER),
        ("replicas", _INTEGER),
        ("meetings", _INTEGER),
        ("left_by", _INTEGER),
    ]


class CopyRows(Arguments):
    """`struct copy_rows`."""

    kind = 28
    _fields_: ClassVar = [
        ("from", _POINTER),
        ("from_stride", _INTEGER),
        ("places", _POINTER),
        ("to", _POINTER),
        ("row_bytes", _INTEGER),
    ]


class ShareTokens(Arguments):
    """`struct share_tokens`."""

    kind = 29
    _fields_: ClassVar = [
        ("exchange", _POINTER),
        ("ids", _POINTER),
        ("top_k", _INTEGER),
        ("shared_ids", _POINTER),
        ("most_tokens", _INTEGER),
        ("first_asked", _INTEGER),
        ("asked", _INTEGER),
        ("first_local", _INTEGER),
        ("local", _INTEGER),
        ("next", _POINTER),
        ("counts", _POINTER),
        ("tokens", _POINTER),
        ("to", _POINTER),
        ("places", _POINTER),
        ("pairs", _POINTER),
    ]


class AwaitAnswers(Arguments):
    """`struct await_answers`."""

    kind = 30
    _fields_: ClassVar = [("exchange", _POINTER)]


class OnStep(Arguments):
    """`struct on_step`."""

    kind = 31
    _fields_: ClassVar = [("number", _INTEGER), ("arguments", _POINTER), ("step", _POINTER)]
