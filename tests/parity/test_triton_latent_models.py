"""Whole models of latent attention and of recurrent layers by the kernels, compared with plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.attention.backend import AttentionBackend, AttentionBatch
from models.attention.gpu import TritonMetaData
from models.attention.triton import TritonAttentionBackend
from models.ops import triton
from models.ops.triton import cache_store
from models.ops.triton.configs import TARGETS
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Row, assert_same_distribution, prompt
from tests.parity.triton_interpreter import DEVICE, requires_interpreter, triton_kernels  # noqa: F401, a fixture
from tests.parity.variants import Variant
from tests.parity.variants.block_sparse import VARIANTS as BLOCK_SPARSE
from tests.parity.variants.compressed import VARIANTS as COMPRESSED
from tests.parity.variants.deepseek import VARIANTS as DEEPSEEK
from tests.parity.variants.glm5_next import VARIANTS as GLM
from tests.parity.variants.qwen3_next import VARIANTS as QWEN

pytestmark = [requires_interpreter, pytest.mark.usefixtures("triton_kernels")]
MODELS = [
    next(variant for variant in (*DEEPSEEK, *QWEN, *GLM) if variant.architecture == name)
    for name in (
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        *("DeepseekV32ForCausalLM", "Qwen3NextForCausalLM", "Glm5NextForCausalLM"),
    )
]
TWO_LAYERS = {"Qwen3NextForCausalLM": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}}
"""Of a variant with more layers, one of each kind: the interpreter takes seconds for a layer."""


class CapturedDecodes(TritonAttentionBackend):
    """Reads decodes from the buffers of captured graphs."""

    def build_metadata(self, batch: AttentionBatch, *arguments: Any) -> TritonMetaData:
        metadata = super().build_metadata(batch, *arguments)
        rows = len(batch.query_lens)
        if metadata.num_decodes < rows:
            return metadata
        self.prepare_for_replay(metadata, rows)
        return self.prepare_for_capture(rows)


def run(path: Path, backend: AttentionBackend | None = None, **options: Any) -> torch.Tensor:
    """Logits of two sequences: prompts in chunks, one of them next to the other's decodes. # [tokens, V]"""
    model = PagedModel(path, **options)
    if backend is not None:
        model.backend = backend
    long, short = Row(prompt(35), slot=2), Row(prompt(20, seed=1), slot=5)
    parts = model.step([(long, 25)])
    parts += model.step([(long, 1), (short, 17)], num_decodes=1)
    parts += model.step([(long, 1), (short, 1)], num_decodes=2)
    parts += model.step([(short, 1), (long, 7)], num_decodes=1)
    return torch.cat(parts)


def by_torch(path: Path, **options: Any) -> torch.Tensor:
    triton.stop()
    return run(path, **options)


@pytest.mark.parametrize(
    "variant",
    [MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.slow)],
    ids=lambda variant: variant.architecture,
)
def test_kernels_give_what_torch_gives(variant: Variant, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    found = run(path, TritonAttentionBackend(DEVICE))
    assert_same_distribution(found, by_torch(path), tolerance=1e-3)


@pytest.mark.parametrize(
    "variant",
    [*MODELS[2:], *(pytest.param(each[0], marks=pytest.mark.slow) for each in (BLOCK_SPARSE, COMPRESSED))],
    ids=lambda variant: variant.architecture,
)
def test_kernels_and_decodes_in_the_buffers_of_graphs_give_what_torch_gives(variant: Variant, tmp_path: Path) -> None:
    fields = variant.overrides | TWO_LAYERS.get(variant.architecture, {})
    path = make_checkpoint(tmp_path, variant.family, **fields)
    backend = CapturedDecodes(DEVICE)
    backend.init_capture(4, 5)
    assert_same_distribution(run(path, backend), by_torch(path), tolerance=1e-3)


def test_bounds_on_memory_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts attend in pieces of ten latents, and their scores are computed token by token."""
    variant = MODELS[2]
    path = make_checkpoint(tmp_path, variant.family, **{**variant.overrides, "index_topk": 30})
    monkeypatch.setattr("models.attention.triton.MAX_EXPANDED_ELEMENTS", 4 * 32 * 10)
    monkeypatch.setattr("models.attention.triton.MAX_INDEX_SCORES", 1)
    assert_same_distribution(run(path, TritonAttentionBackend(DEVICE)), by_torch(path), tolerance=1e-3)


@pytest.mark.slow
def test_latents_in_8_bits(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, MODELS[1].family, **MODELS[1].overrides)
    kept = {"kv_dtype": torch.float8_e4m3fn}
    found = run(path, TritonAttentionBackend(DEVICE), **kept)
    assert_same_distribution(found, by_torch(path, **kept), tolerance=0.1)


def test_blocks_of_keys_in_the_fp8_of_gfx942_give_what_those_in_the_common_fp8_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch stores prompts and kernels store decodes, in one format: -0 of the common one is NaN in gfx942's."""
    fields = {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}
    fields["mlp_layer_types"] = ["dense", "sparse"]
    path = make_checkpoint(tmp_path, BLOCK_SPARSE[0].family, **BLOCK_SPARSE[0].overrides | fields)
    expected = run(path, TritonAttentionBackend(DEVICE), kv_dtype=torch.float8_e4m3fn)
    monkeypatch.setattr(cache_store, "target_of", lambda device: TARGETS["gfx942"])
    found = run(path, TritonAttentionBackend(DEVICE), kv_dtype=torch.float8_e4m3fn)
    assert_same_distribution(found, expected, tolerance=1e-4)
