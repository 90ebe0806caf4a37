"""NVIDIA's assembler: the release that Triton calls, and when the log mentions it."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import models
from engine.config.config import Config
from engine.runner import build
from models.ops.triton import probe as ptxas

GPU = torch.device("cuda", 0)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Capability of the emulated GPU: initially Hopper's."""
    found = [9, 0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(found))
    return found


@pytest.mark.parametrize(
    ("release", "arch", "is_told"),
    [
        ("12.8", [9, 0], True),
        ("13.0", [9, 0], True),
        ("13.1", [9, 0], False),
        ("14.0", [9, 0], False),
        ("12.8", [8, 9], False),
        (None, [9, 0], False),
    ],
)
def test_an_old_assembler_is_reported_on_hopper(
    release: str | None, arch: list[int], is_told: bool, capability: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    capability[:] = arch
    monkeypatch.setattr(ptxas, "release", lambda _: release)
    found = ptxas.caution(GPU)
    assert (found is not None) == is_told
    if found is not None:
        assert re.search(f"ptxas {release} .* TRITON_PTXAS_PATH name the ptxas of CUDA 13.1 or newer$", found)


def test_the_release_is_triton_s_own_for_the_gpu(capability: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    asked: list[int] = []
    tool = SimpleNamespace(get_ptxas=lambda arch: asked.append(arch) or SimpleNamespace(version="12.9"))
    with monkeypatch.context() as patch:
        patch.setattr(ptxas.importlib, "import_module", lambda _: tool)
        assert ptxas.release(GPU) == "12.9"
        # A Triton with another interface.
        patch.setattr(ptxas.importlib, "import_module", lambda _: SimpleNamespace())
        assert ptxas.release(GPU) is None
    assert asked == [90]
    assert re.fullmatch(r"\d+\.\d+", str(ptxas.release(GPU)))


def test_ptxas_has_no_release_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert ptxas.release(GPU) is None
    assert ptxas.caution(GPU) is None
    assert ptxas.caution(torch.device("cpu")) is None


@pytest.mark.parametrize("have_states", [True, False])
def test_a_caution_is_logged_when_a_model_with_recurrent_layers_is_served(
    have_states: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load_model(config: Config, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(config=config, layer_caches=lambda: SimpleNamespace(have_states=have_states))

    monkeypatch.setattr(build, "load_model", load_model)
    monkeypatch.setattr(build, "pin_torch_threads", lambda *_, **__: None)
    monkeypatch.setattr(build, "pin_operator_threads", lambda *_: frozenset())
    monkeypatch.setattr(ptxas, "caution", lambda device: f"known of {device}")
    path = Path(models.__file__).parent / "demo" / "checkpoint"
    with caplog.at_level("INFO"):
        build.load_rank(Config(model=str(path), device="cpu"), path)
    assert ("known of cpu" in caplog.text) == have_states
