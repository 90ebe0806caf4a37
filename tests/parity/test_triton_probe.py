"""Whether Triton's kernels can be used is determined by running one."""

from collections.abc import Iterator

import pytest
import torch

from models.attention.backend import select_backend
from models.ops import triton
from models.ops.triton import probe, probe_kernel
from models.ops.triton.configs import Target, nearest_target
from tests.parity.triton_interpreter import DEVICE


@pytest.fixture(autouse=True)
def _looks_again() -> Iterator[None]:
    probe.probe.cache_clear()
    yield
    probe.probe.cache_clear()


def test_kernels_run_where_a_small_one_gives_the_right_numbers() -> None:
    assert triton.start(DEVICE) is None
    assert triton.runs(torch.zeros(2, device=DEVICE))
    triton.stop()
    assert not triton.runs(torch.zeros(2, device=DEVICE))


def test_a_kernel_that_is_wrong_keeps_all_of_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_kernel, "largest_error", lambda device: float("nan"))
    assert "is off by nan" in (triton.start(DEVICE) or "")
    assert not triton.active()


def test_a_compiler_that_raises_keeps_all_of_them_off_and_its_words_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> float:
        raise RuntimeError(f"no C compiler for {device}")

    monkeypatch.setattr(probe_kernel, "largest_error", fail)
    assert triton.start(DEVICE) == f"Triton failed on {DEVICE}: RuntimeError: no C compiler for {DEVICE}"


def test_a_gpu_without_configurations_is_a_reason_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def like_none(device: torch.device) -> Target:
        return nearest_target("sm_75")

    monkeypatch.setattr(probe, "target_of", like_none)
    assert (triton.start(DEVICE) or "").startswith("the GPU is sm_75, for which there are no kernel configurations")


def test_triton_is_not_even_tried_where_attention_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton, "start", tried.append)
    triton.leave_to_torch(frozenset({"attention"}))
    assert select_backend(torch.device("cuda")).name == "torch"
    assert not tried


def test_a_gpu_on_which_triton_fails_gets_plain_torch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(probe_kernel, "largest_error", lambda device: 7.0)
    assert select_backend(torch.device("cuda")).name == "torch"
    assert (
        "Plain torch computes everything, slowly: Triton's product of two matrices on cuda is off by 7.0"
        in caplog.text
    )


def test_no_gpu_at_all_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is cuda, but torch finds no GPU"):
        select_backend(torch.device("cuda"))
