"""ROCm's library `aiter` where it is installed and passes its probe: which operators it computes, and the calls.

The probe runs in a process of its own: whatever the library does when it is imported or called, serving goes on.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
import torch.nn.functional as F

_PROBE_SECONDS = 300.0
"""Some of its kernels are compiled when they are first called."""
_ARCHITECTURES = ("gfx942", "gfx950")
"""That the library is made for."""
_PROBLEMS = ((128, torch.bfloat16), (896, torch.float16), (8192, torch.bfloat16))
"""Sizes and types that the probe computes: libraries choose among kernels by them."""
_EPS = 1e-6

_library: Any = None
_started: frozenset[str] = frozenset()


def start(operators: frozenset[str]) -> None:
    """Have the library compute these operators, which passed the probe, from here on."""
    global _library, _started
    _library = importlib.import_module("aiter") if operators else None
    _started = operators


def stop() -> None:
    """Leave everything to others again."""
    start(frozenset())


def runs(operator: str, *tensors: torch.Tensor) -> bool:
    """Whether the library computes an operator of tensors such as these: matrices of 16-bit floats without gaps."""
    return operator in _started and all(
        tensor.dim() <= 2 and tensor.is_contiguous() and tensor.dtype in (torch.bfloat16, torch.float16)
        for tensor in tensors
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The root-mean-square norm. # [rows, size], [size] -> [rows, size]"""
    normed: torch.Tensor = _library.rmsnorm2d_fwd(x, weight, eps)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the sum of `x` and `residual`, and that sum. # [rows, size] each"""
    normed, summed = torch.empty_like(x), torch.empty_like(x)
    _library.rmsnorm2d_fwd_with_add(normed, x, residual, summed, weight, eps)
    return normed, summed


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of the two side by side. # [rows, 2 * size] -> [rows, size]"""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _library.silu_and_mul(out, gate_up)
    return out


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, by tanh, of the two side by side. # [rows, 2 * size] -> [rows, size]"""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _library.gelu_tanh_and_mul(out, gate_up)
    return out


def unfit(arch: str) -> str | None:
    """Why the library computes nothing on such a GPU; None: it may."""
    if arch in _ARCHITECTURES:
        return None
    return f"aiter is made for {' and '.join(_ARCHITECTURES)}, and the GPU is {arch}"


def probe(device: str, seconds: float = _PROBE_SECONDS) -> dict[str, str | None]:
    """By operator, None where the library gave the right numbers, else what was wrong, in words. In a child."""
    code = f"from models.kernels import aiter; aiter.report({device!r})"
    # Files: a pipe that a compiler it started holds open would be waited for.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        # The parent's own code, whatever the directory.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        command, environment = [sys.executable, "-P", "-c", code], {**os.environ, "PYTHONPATH": path}
        try:
            done = subprocess.run(command, stdout=out, stderr=errors, timeout=seconds, check=False, env=environment)
        except subprocess.TimeoutExpired:
            return _all(f"its probe took longer than {seconds:g} s")
        printed, said = _text(out), _text(errors)
    if done.returncode < 0:
        return _all(f"its probe was ended by signal {-done.returncode}")
    _, mark, found = printed.rpartition(_MARK)
    if done.returncode or not mark:
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        return _all(f"its probe ended with exit code {done.returncode}: {last[0]}")
    # Behind it is what the library prints at its end.
    reasons: dict[str, str | None] = json.JSONDecoder().raw_decode(found)[0]
    return reasons


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


_MARK = "kaon-aiter:"
"""Between what the library prints and what the probe found."""


def report(device: str) -> None:
    """The probe's work: print by operator what was wrong."""
    try:
        library = importlib.import_module("aiter")
    except ModuleNotFoundError as error:
        missing = "aiter is not installed" if error.name == "aiter" else f"it could not be imported: {error}"
        reasons = _all(missing)
    # A library that is broken may raise anything.
    except Exception as error:  # noqa: BLE001
        reasons = _all(f"it could not be imported: {type(error).__name__}: {error}")
    else:
        on = torch.device(device)
        if on.index is not None:
            torch.cuda.set_device(on)
        reasons = {name: _wrong(library, name, on) for name in _CHECKS}
    sys.stdout.write(f"{_MARK}{json.dumps(reasons)}")


def _wrong(library: Any, operator: str, device: torch.device) -> str | None:
    """What is wrong with one operator."""
    global _library
    _library = library
    functions, check = _CHECKS[operator]
    if absent := [name for name in functions if not hasattr(library, name)]:
        return f"it has no {' and no '.join(absent)}"
    try:
        errors = [check(*(_values(shift, *problem, device) for shift in (0, 3))) for problem in _PROBLEMS]
    except Exception as failure:  # noqa: BLE001, as above
        return f"it failed: {type(failure).__name__}: {failure}"
    error = max(errors)
    return None if error <= 0.05 else f"its numbers are off by {error:.3g}"


def _norm_error(x: torch.Tensor, residual: torch.Tensor) -> float:
    weight, shape = residual[1].contiguous(), x.shape[1:]
    normed, summed = add_rms_norm(x, residual, weight, _EPS)
    expected = F.rms_norm((x + residual).float(), shape, weight.float(), _EPS)
    alone = F.rms_norm(x.float(), shape, weight.float(), _EPS)
    pairs = (normed, expected), (summed, x + residual), (rms_norm(x, weight, _EPS), alone)
    return max(_apart(*pair) for pair in pairs)


def _activation_error(gate: torch.Tensor, up: torch.Tensor) -> float:
    side_by_side = torch.cat((gate, up), 1)
    by_tanh = F.gelu(gate.float(), approximate="tanh") * up.float()
    return max(
        _apart(silu_and_mul(side_by_side), F.silu(gate.float()) * up.float()),
        _apart(gelu_tanh_and_mul(side_by_side), by_tanh),
    )


def _values(shift: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Small numbers, never all zero in a row. # [4, size]"""
    places = torch.arange(4 * size, device=device).view(4, size)
    return (((places + shift) % 11 - 4) / 4).to(dtype)


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.float() - expected.float()).abs().max()
    # A difference that is no number is as wrong as can be.
    return float(difference) if difference == difference else float("inf")


_CHECKS: Mapping[str, tuple[tuple[str, ...], Callable[[torch.Tensor, torch.Tensor], float]]] = MappingProxyType(
    {
        "norm": (("rmsnorm2d_fwd", "rmsnorm2d_fwd_with_add"), _norm_error),
        "activation": (("silu_and_mul", "gelu_tanh_and_mul"), _activation_error),
    }
)
OPERATORS = tuple(_CHECKS)
"""That are called in the library; the names are those of `models.kernels.backends`."""


def _all(reason: str) -> dict[str, str | None]:
    return dict.fromkeys(OPERATORS, reason)
