"""Whole models with the GPU's attention backends, in Triton's interpreter, against the CPU backend."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models.attention.backend import AttentionBackend, AttentionBatch
from models.attention.cpu import CPUAttentionBackend
from models.attention.gpu import TritonMetaData
from models.attention.torch_paged import TorchAttentionBackend
from models.attention.triton import TritonAttentionBackend
from models.ops import triton as kernels
from models.ops.types import AttentionInputs, AttentionOptions, KVCacheTensor
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import CPU, PagedModel, Row, prompt
from tests.parity.tolerance import assert_within, with_bound
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels
from tests.parity.variants import attention_2026, gemma3, gpt_oss
from tests.sweeps import some

__all__ = ["triton_kernels"]

pytestmark = requires_interpreter

GPT_OSS = gpt_oss.VARIANTS[0]
GEMMA = gemma3.VARIANTS[0]
MIMO = attention_2026.VARIANTS[0]


# Gpt-oss has windows, too, and Qwen3 is Llama with norms of heads.
@pytest.fixture(params=some(["llama", "qwen3", "gemma3", "gpt_oss", "mimo"], "qwen3", "gpt_oss", "mimo"))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Plain, with norms of heads, with windows, with windows and sinks, and with values smaller than keys as well."""
    match request.param:
        case "gemma3":
            return make_checkpoint(tmp_path, GEMMA.family, **GEMMA.overrides)
        case "gpt_oss":
            return make_checkpoint(tmp_path, GPT_OSS.family, **GPT_OSS.overrides)
        case "mimo":
            return make_checkpoint(tmp_path, MIMO.family, **MIMO.overrides)
        case name:
            return make_checkpoint(tmp_path, name)


@pytest.mark.parametrize(
    "backend_class", [TritonAttentionBackend, pytest.param(TorchAttentionBackend, marks=pytest.mark.slow)]
)
def test_mixed_steps_of_chunks_and_decodes_agree_with_the_cpu_backend(
    checkpoint: Path, backend_class: type[TritonAttentionBackend]
) -> None:
    found = _run(PagedModel(checkpoint, backend=backend_class(CPU)))
    assert_within(found, *_with_bound(PagedModel(checkpoint, backend=CPUAttentionBackend())))


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("checkpoint", some(["qwen3", "gpt_oss"], "gpt_oss"), indirect=True)
def test_kernels_compute_all_of_a_model(checkpoint: Path) -> None:
    found = _run(PagedModel(checkpoint, backend=TritonAttentionBackend(CPU)))
    kernels.stop()
    assert_within(found, *_with_bound(PagedModel(checkpoint, backend=CPUAttentionBackend())))


def test_a_cache_in_fp8_agrees_with_the_cpu_backend(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    models = [
        PagedModel(path, backend=backend, kv_dtype=torch.float8_e4m3fn)
        for backend in (TorchAttentionBackend(CPU), CPUAttentionBackend())
    ]
    expected, bound = _with_bound(models[1])
    # At any token, a number half-way between two cache values may be rounded to either.
    assert_within(_run(models[0]), expected, bound.max())


def test_a_replay_reads_its_step_from_the_buffers_that_were_captured() -> None:
    """The graph of four rows replays three: the fourth writes nothing, attends to nothing, and its output is zeros."""
    torch.manual_seed(0)
    backend = TritonAttentionBackend(CPU)
    backend.init_capture(max_batch_size=8, max_blocks=40)
    captured = backend.prepare_for_capture(4)
    assert captured is not None
    q, k, v = torch.randn(4, 8, 16).split([4, 2, 2], 1)

    def step_of(lengths: list[int]) -> TritonMetaData:
        rows, width = len(lengths), 120 // len(lengths)
        tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
        slots = np.array([tables[row, (n - 1) // 16] * 16 + (n - 1) % 16 for row, n in enumerate(lengths)])
        return backend.build_metadata(
            AttentionBatch(
                query_lens=np.ones(rows, np.int64),
                seq_lens=np.array(lengths),
                block_tables=tables[:, : width - 2],
                slot_mapping=slots,
                num_decodes=rows,
            )
        )

    # What a larger step has left in the buffers is not read again.
    backend.prepare_for_replay(step_of([5, 300, 17, 40]), 4)
    for lengths in ([5, 300, 17], [6, 301, 600]):
        caches, step = [_cache(), _cache()], step_of(lengths)
        backend.prepare_for_replay(step, 4)
        replayed = _forward(backend, q, k, v, caches[0], captured)
        assert torch.equal(replayed[:3], _forward(backend, q[:3], k[:3], v[:3], caches[1], step))
        assert not replayed[3].any()
        assert torch.equal(caches[0].k_cache, caches[1].k_cache)


def _cache() -> KVCacheTensor:
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(120, 2, 16, 16, generator=generator) for _ in range(2))
    return KVCacheTensor(k, v)


def _forward(
    backend: AttentionBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCacheTensor,
    metadata: TritonMetaData,
) -> torch.Tensor:
    return backend.forward(q, k, v, cache, metadata, AttentionInputs(AttentionOptions(scale=0.25)))


def _run(model: PagedModel) -> torch.Tensor:
    """Log probabilities of two prompts, one in chunks, and then of decodes next to a third prompt. # [tokens, V]"""
    rows = [Row(prompt(length, seed=length)) for length in (30, 45, 9)]
    logits = [
        *model.step([(rows[0], 28), (rows[1], 30)]),
        *model.step([(rows[0], 1), (rows[1], 14)], num_decodes=1),
        *model.step([(rows[0], 1), (rows[1], 1), (rows[2], 9)], num_decodes=2),
    ]
    return torch.cat(logits).log_softmax(-1)


def _with_bound(model: PagedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with bounds of the rounding errors."""
    return with_bound(model.model, lambda: _run(model))
