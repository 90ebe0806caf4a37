"""A launch without Triton's binder runs the binary that Triton would have chosen for the same arguments."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.compiler
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from models.ops.triton.launcher import DirectKernel
from models.ops.triton.specializations import CheckedKernels, UncheckedKernel

Ran = list[int]
"""Indices of the binaries that ran, in order of their compilation."""


def scaled(  # type: ignore[no-untyped-def]
    x, out, rows, stride, scale, SIZE: tl.constexpr, HAS_SCALE: tl.constexpr, DEPTH: tl.constexpr = 4
):
    """A kernel that is never compiled."""


def named_alike(  # type: ignore[no-untyped-def]
    grid, found, form, device, run, function, metadata, active, rest, launches: tl.constexpr, bind: tl.constexpr
):
    """A kernel whose parameters have names that a launcher may use itself."""


@pytest.fixture(params=["hip", "cuda"])
def ran(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Triton's compiler creates binaries that record their index; every form is another binary."""
    target = GPUTarget("hip", "gfx942", 64) if request.param == "hip" else GPUTarget("cuda", 90, 32)
    ran: Ran = []
    numbers: list[int] = []

    def compile(source: Any, target: Any, options: Any) -> Any:
        number = len(numbers)
        numbers.append(number)
        parts = {"function": None, "packed_metadata": None, "launch_metadata": lambda *_: None}
        return SimpleNamespace(run=lambda *_: ran.append(number), **parts)

    monkeypatch.setattr(triton.compiler, "compile", compile)
    monkeypatch.setattr(
        driver,
        "_active",
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        ),
    )
    return ran


def kernel_of(**hints: Any) -> DirectKernel:
    return DirectKernel(scaled, do_not_specialize=["rows"], **hints)


@cache
def bytes_at(num_bytes: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that begins at a given byte of a storage of a given size; its memory is never accessed."""
    return torch.empty(num_bytes, dtype=torch.uint8)[offset : offset + 64].view(dtype)


_SMALL, _LARGE = 1 << 10, (1 << 31) + 64
tensors = st.builds(
    bytes_at, st.sampled_from([_SMALL, _LARGE]), st.sampled_from([0, 4, 16]), st.sampled_from([torch.half, torch.int])
)
integers = st.sampled_from([0, 1, 2, 16, 17, 64, -16, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**33, 2**63])
launches = st.tuples(
    tensors,
    tensors | st.none(),
    integers,
    integers | st.booleans(),
    st.sampled_from([0.5, 1.0, 1, 16, 17, True]),
    st.sampled_from([16, 32]),
    st.booleans(),
    st.sampled_from([{}, {"num_warps": 8}, {"num_stages": 3}, {"DEPTH": 8}, {"DEPTH": 4}]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(launches, min_size=4, max_size=12))
def launched_as_by_triton(ran: Ran, made: list[tuple[Any, ...]]) -> None:
    kernel = kernel_of()
    for *arguments, size, has_scale, options in made:
        given_by_name = {"SIZE": size, "HAS_SCALE": has_scale, **options}
        for _ in range(2):
            kernel[2, 3](*arguments, **given_by_name)
        JITFunction.run(kernel, *arguments, grid=(2, 3), warmup=False, **given_by_name)
        first, again, triton_s = ran[-3:]
        assert first == again == triton_s


def test_every_launch_runs_the_binary_that_triton_chooses(ran: Ran) -> None:
    """With arguments of any types, alignments and sizes, in any order."""
    launched_as_by_triton(ran)


@pytest.mark.parametrize("first", [0, 1, 2, 16])
@pytest.mark.parametrize("second", [0, 1, 2, 16])
def test_an_integer_that_triton_specialises_selects_the_binary(first: int, second: int, ran: Ran) -> None:
    """With launches that differ only in one integer: 1, a multiple of 16, or another number."""
    kernel, x = kernel_of(), torch.zeros(64)
    for columns in (first, second, first):
        arguments, given_by_name = (x, x, 3, columns, 1.0), {"SIZE": 16, "HAS_SCALE": True}
        kernel[2, 3](*arguments, **given_by_name)
        JITFunction.run(kernel, *arguments, grid=(2, 3), warmup=False, **given_by_name)
        assert ran[-2] == ran[-1]


def test_the_second_launch_of_a_form_does_not_pass_through_triton(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = kernel_of(), torch.zeros(64)
    bound = []

    def run(*arguments: Any, **options: Any) -> Any:
        bound.append(arguments)
        return JITFunction.run(*arguments, **options)

    monkeypatch.setattr(DirectKernel, "run", run)
    for rows in (1, 2, 3):  # Not specialised.
        kernel[(1,)](x, x, rows, 64, 1.0, SIZE=16, HAS_SCALE=True)
    kernel[(1,)](x[1:], x, 3, 64, 1.0, SIZE=16, HAS_SCALE=True)
    assert len(bound) == 2, "the first launch, and that of another alignment"
    # A profiler is called by Triton's own path.
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    kernel[(1,)](x, x, 4, 64, 1.0, SIZE=16, HAS_SCALE=True)
    assert len(bound) == 3


def test_a_kernel_is_given_its_own_arguments_whatever_their_names_are(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Any, ...]] = []
    compiled = SimpleNamespace(
        run=lambda *launch: given.append(launch[9:]),
        function=None,
        packed_metadata=None,
        launch_metadata=lambda *_: None,
    )
    monkeypatch.setattr(triton.compiler, "compile", lambda *_, **__: compiled)
    kernel, x = DirectKernel(named_alike), torch.zeros(64)
    arguments = x, x[1:], 3, 4, 5, 6, 7, 8.0, 9
    for _ in range(2):
        kernel[(1,)](*arguments, launches=16, bind=False)
    by_triton, direct = given
    assert all(one is other for one, other in zip(by_triton, (*arguments, 16, False), strict=True))
    assert all(one is other for one, other in zip(direct, (*arguments, 16, False), strict=True))


def test_a_form_that_was_not_compared_is_refused_although_others_are_launched_directly(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled, "__module__", "models.ops.triton.scaled")
    kernel, x = kernel_of(), torch.zeros(64)
    launch = {"SIZE": 16, "HAS_SCALE": True}
    checked = CheckedKernels()
    checked.watch()
    try:
        with checked.checking("norm"):
            kernel[(1,)](x, x, 1, 64, 1.0, **launch)
        checked.refuse_others()
        kernel[(1,)](x, x, 2, 64, 1.0, **launch)
        with pytest.raises(UncheckedKernel):
            kernel[(1,)](x[1:], x, 2, 64, 1.0, **launch)
        kernel[(1,)](x, x, 2, 64, 1.0, **launch)
    finally:
        checked.stop()
    assert ran == [0, 0, 0]
