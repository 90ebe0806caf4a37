"""Selects the implementation of each operator once at the start, by availability and `kernel_backend`, and logs it."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from models.ops import aiter, triton
from models.ops.aiter import probe
from models.ops.aiter.cases import Sizes
from models.ops.aiter.library import OPERATORS as AITER_OPERATORS

OPERATORS = ("attention", "norm", "activation", "moe", "linear", "recurrent", "sampling", "gemm", "all_reduce")
"""Attention of every kind and its stores; norms; gated activations; experts and their routing; products with weights
that stay quantised; recurrent layers; sampling; products with weights that are dense; sums over ranks."""
DECODE = "decode"
"""Decodes of one token, if they use another implementation than the other rows of attention."""
PREFILL = "prefill"
"""Attention of long prompts over gathered keys: by aiter, else by torch's flash attention, or by Triton's kernels."""
AUTO, TRITON, TORCH, AITER = "auto", "triton", "torch", "aiter"
BACKENDS = (AUTO, TRITON, TORCH, AITER)
WHEN_ASKED = frozenset({DECODE, "gemm", "all_reduce"})
"""Operators that aiter computes only if `kernel_backend` names it for them."""
_WITHOUT_TRITON = frozenset({"gemm", "all_reduce"})
"""Operators without a Triton kernel, which torch's libraries compute."""
_AFTER_TRITON = frozenset({"attention", DECODE, PREFILL, "linear"})
"""Operators of aiter that read data stored or rounded by Triton's kernels."""


class Choice(NamedTuple):
    """The implementation of one operator."""

    operator: str
    backend: str
    reason: str | None = None
    """The reason why it is not the requested implementation."""

    def __str__(self) -> str:
        return f"{self.operator} by {self.backend}" + (f" ({self.reason})" if self.reason else "")


def parse(words: Sequence[str]) -> dict[str, str]:
    """The requested backend by operator: `BACKEND` applies to all, `OPERATOR=BACKEND` to one; the last word counts.

    The result includes decodes only if they are named or `aiter` is requested for all, and always long prompts.
    Raises `ValueError` with one sentence for an unknown name.
    """
    wanted = dict.fromkeys((*OPERATORS, PREFILL), AUTO)
    for word in words:
        operator, equals, backend = word.rpartition("=")
        if backend not in BACKENDS or (equals and operator not in (*OPERATORS, DECODE, PREFILL)):
            raise ValueError(
                f"kernel_backend is {word}; it must be one of {', '.join(BACKENDS)}, or OPERATOR=BACKEND for one of "
                f"{', '.join((*OPERATORS, DECODE, PREFILL))}"
            )
        if (operator in _WITHOUT_TRITON and backend == TRITON) or (operator == DECODE and backend == TORCH):
            other = TRITON if operator == DECODE else TORCH
            raise ValueError(f"kernel_backend is {word}, but {operator} is computed by {other} or {AITER}; name one")
        if equals:
            wanted[operator] = backend
        else:
            wanted = dict.fromkeys((*OPERATORS, PREFILL), backend)
            if backend == AITER:
                wanted[DECODE] = backend
        if wanted.get(DECODE) == AUTO:
            del wanted[DECODE]
    return wanted


def named(words: Sequence[str], backend: str) -> frozenset[str]:
    """The operators that `kernel_backend` assigns to a backend by name; the last word counts."""
    by_name: dict[str, str] = {}
    for word in words:
        operator, equals, given = word.rpartition("=")
        by_name = {**by_name, operator: given} if equals else {}
    return frozenset(operator for operator, given in by_name.items() if given == backend)


def choose(
    wanted: Mapping[str, str], triton_reason: str | None, aiter_reasons: Mapping[str, str | None]
) -> tuple[Choice, ...]:
    """The implementation of each operator on a GPU.

    `triton_reason`: why Triton is not used, None if it is. `aiter_reasons`: the same for aiter by operator; Kaon does
    not call aiter for operators that are missing in it. A missing backend is no error: the next one is used.
    """
    choices = [_choice(operator, asked, triton_reason, aiter_reasons) for operator, asked in wanted.items()]
    if choices[0].backend == TORCH:
        apart = DECODE, PREFILL
        choices = [Choice(one.operator, TORCH, "attention is") if one.operator in apart else one for one in choices]
    # Long prompts use torch's flash attention or Triton's kernels, which is decided after both were compared.
    return tuple(one for one in choices if one.operator != PREFILL or one.backend == AITER)


def _choice(operator: str, wanted: str, triton_reason: str | None, aiter_reasons: Mapping[str, str | None]) -> Choice:
    if wanted == TORCH:
        return Choice(operator, TORCH)
    unfit = aiter_reasons.get(operator, "Kaon does not call it for this")
    if operator in _AFTER_TRITON and unfit is None:
        unfit = triton_reason
    if unfit is None and (wanted == AITER or (wanted == AUTO and operator not in WHEN_ASKED)):
        return Choice(operator, AITER)
    reason = f"not aiter: {unfit}" if wanted == AITER else None
    if operator in _WITHOUT_TRITON:
        return Choice(operator, TORCH, reason)
    if triton_reason is None:
        return Choice(operator, TRITON, reason)
    if reason is None or unfit == triton_reason:
        return Choice(operator, TORCH, triton_reason)
    return Choice(operator, TORCH, f"{reason}; {triton_reason}")


def start(device: torch.device, words: Sequence[str], sizes: Sizes = Sizes()) -> tuple[Choice, ...]:  # noqa: B008
    """Probe the libraries on a GPU, and select the implementations that layers call from now on. Raises as `parse`.

    `sizes`: the model's sizes, with which aiter is probed.
    """
    wanted = parse(words)
    triton_reason = None if set(wanted.values()) == {TORCH} else triton.start(device)
    reasons = aiter_reasons(
        device, [operator for operator, asked in wanted.items() if _may_take(operator, asked)], sizes
    )
    choices = choose(wanted, triton_reason, reasons)
    try:
        _start_aiter(choices, decodes_apart=DECODE in wanted)
    # A library that passed its probe may still fail here, where other libraries are loaded.
    except Exception as error:  # noqa: BLE001
        aiter.stop()
        failed = f"it failed after its probe: {type(error).__name__}: {error}".splitlines()[0]
        choices = choose(wanted, triton_reason, dict.fromkeys(reasons, failed))
    triton.leave_to_torch(frozenset(choice.operator for choice in choices if choice.backend == TORCH))
    return choices


def _start_aiter(choices: Sequence[Choice], *, decodes_apart: bool) -> None:
    by_aiter = frozenset(choice.operator for choice in choices if choice.backend == AITER)
    aiter.start(by_aiter, decodes_apart=decodes_apart)


def _may_take(operator: str, wanted: str) -> bool:
    """Whether aiter must be probed for an operator."""
    return operator in AITER_OPERATORS and (wanted == AITER or (wanted == AUTO and operator not in WHEN_ASKED))


def aiter_reasons(
    device: torch.device,
    operators: Collection[str] = AITER_OPERATORS,
    sizes: Sizes = Sizes(),  # noqa: B008, immutable
) -> dict[str, str | None]:
    """For each operator of aiter, the reason why it is not used on a GPU; None if it may be used."""
    if not operators:
        return {}
    if torch.version.hip is None:
        return dict.fromkeys(operators, "aiter is for AMD GPUs")
    arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    unfit = probe.unfit(arch)
    return probe.probe(str(device), operators, sizes) if unfit is None else dict.fromkeys(operators, unfit)
