"""What computes each operator: chosen once at start, by what there is and what `kernel_backend` says, and printed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from models.kernels import aiter, triton

OPERATORS = ("attention", "norm", "activation", "moe", "linear", "recurrent", "sampling")
"""Attention of every kind and its stores; norms; gated activations; experts and their routing; products with weights
that stay quantised; recurrent layers; sampling."""
AUTO, TRITON, TORCH, AITER = "auto", "triton", "torch", "aiter"
BACKENDS = (AUTO, TRITON, TORCH, AITER)


class Choice(NamedTuple):
    """What computes one operator."""

    operator: str
    backend: str
    reason: str | None = None
    """Why it is not what was asked for."""

    def __str__(self) -> str:
        return f"{self.operator} by {self.backend}" + (f" ({self.reason})" if self.reason else "")


def parse(words: Sequence[str]) -> dict[str, str]:
    """By operator, which backend is asked for: `BACKEND` is for all, `OPERATOR=BACKEND` for one, the last counts.

    Raises `ValueError`, a sentence, for a name that there is not.
    """
    wanted = dict.fromkeys(OPERATORS, AUTO)
    for word in words:
        operator, equals, backend = word.rpartition("=")
        if backend not in BACKENDS or (equals and operator not in OPERATORS):
            raise ValueError(
                f"kernel_backend is {word}; it must be one of {', '.join(BACKENDS)}, or OPERATOR=BACKEND for one of "
                f"{', '.join(OPERATORS)}"
            )
        wanted.update({operator: backend} if equals else dict.fromkeys(OPERATORS, backend))
    return wanted


def choose(
    wanted: Mapping[str, str], triton_reason: str | None, aiter_reasons: Mapping[str, str | None]
) -> tuple[Choice, ...]:
    """What computes each operator of a GPU.

    `triton_reason`: why Triton computes nothing, None where it does. `aiter_reasons`: the same of aiter by operator;
    those that are not in it, it is not called for. What is missing never fails: what is next computes.
    """
    return tuple(_choice(operator, wanted[operator], triton_reason, aiter_reasons) for operator in OPERATORS)


def _choice(operator: str, wanted: str, triton_reason: str | None, aiter_reasons: Mapping[str, str | None]) -> Choice:
    if wanted == TORCH:
        return Choice(operator, TORCH)
    unfit = aiter_reasons.get(operator, "Kaon does not call it for this")
    if wanted in (AUTO, AITER) and unfit is None:
        return Choice(operator, AITER)
    reason = f"not aiter: {unfit}" if wanted == AITER else None
    if triton_reason is None:
        return Choice(operator, TRITON, reason)
    return Choice(operator, TORCH, triton_reason if reason is None else f"{reason}; {triton_reason}")


def start(device: torch.device, words: Sequence[str]) -> tuple[Choice, ...]:
    """Probe what there is on a GPU, choose, and have layers call it from here on. Raises `ValueError` as `parse`."""
    wanted = parse(words)
    triton_reason = None if set(wanted.values()) == {TORCH} else triton.start(device)
    reasons = aiter_reasons(device) if {AUTO, AITER} & set(wanted.values()) else {}
    choices = choose(wanted, triton_reason, reasons)
    triton.leave_to_torch(frozenset(choice.operator for choice in choices if choice.backend == TORCH))
    aiter.start(frozenset(choice.operator for choice in choices if choice.backend == AITER))
    return choices


def aiter_reasons(device: torch.device) -> dict[str, str | None]:
    """By operator that Kaon calls aiter for, why it is not used on a GPU; None where it may be."""
    if torch.version.hip is None:
        return dict.fromkeys(aiter.OPERATORS, "aiter is for AMD GPUs")
    arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    unfit = aiter.unfit(arch)
    return aiter.probe(str(device)) if unfit is None else dict.fromkeys(aiter.OPERATORS, unfit)
