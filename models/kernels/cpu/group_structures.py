"""Mirrors of what group.c and its operator take; see structures.py."""

import ctypes
from typing import ClassVar

from models.kernels.cpu.structures import Arguments


class Group(ctypes.Structure):
    """`struct group`: a rank's place among those that share memory."""

    _fields_: ClassVar = [
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("has_left", ctypes.c_int64),
    ]


class AllReduce(Arguments):
    """`struct all_reduce`."""

    kind = 27
    _fields_: ClassVar = [
        ("x", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("is_float", ctypes.c_int64),
        ("group", ctypes.c_void_p),
    ]
