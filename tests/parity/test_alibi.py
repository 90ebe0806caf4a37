"""ALiBi as further dimensions of queries and keys: the biases are exact in every dtype, also of the cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.architectures.alibi import MptAttention, power_slopes
from models.architectures.config import ModelConfig
from models.errors import CheckpointError
from models.layers.alibi import AlibiEmbedding, AlibiHeads, num_extra_dims
from models.loading.checkpoint import read_checkpoint_config
from models.loading.loader import default_dtype, load_model
from models.ops.columns import precede_heads
from models.ops.cpu import runtime
from models.ops.torch_ops import rotate
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, assert_computes, prompt
from tests.parity.variants import Variant
from tests.parity.variants.older import VARIANTS

needs_operators = pytest.mark.skipif(
    runtime.load_library() is None, reason="the operators were not built: install again where there is a C compiler"
)


def variant_of(architecture: str) -> Variant:
    return next(each for each in VARIANTS if each.architecture == architecture)


def config_of(directory: Path, **overrides: Any) -> ModelConfig:
    variant = variant_of("MptForCausalLM")
    config = read_checkpoint_config(make_checkpoint(directory, variant.family, **overrides))
    assert isinstance(config, ModelConfig)
    return config


@pytest.mark.parametrize(
    ("dtype", "cached"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_biases_are_exact_in_the_dtypes_of_the_model_and_the_cache(dtype: torch.dtype, cached: torch.dtype) -> None:
    slopes, scale = power_slopes(12), 64**-0.5
    with default_dtype(dtype):
        heads = AlibiHeads(slopes, 12, 64, scale)
    positions = torch.tensor([0, 1, 15, 16, 255, 4097, 30_000, 65_535])
    rotation = AlibiEmbedding(64, 1 << 16)(positions)
    nothing = torch.zeros(len(positions), 12, 64, dtype=dtype)
    q, k = (rotate(each, *rotation).double() for each in heads(nothing, nothing))
    assert q.isfinite().all()
    # The cache rounds keys.
    k = k.to(cached).double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    # A query adds the same to all its scores.
    found = scores - scores[..., :1]
    expected = slopes.double()[:, None, None] * positions.double()
    torch.testing.assert_close(found, expected.expand_as(found), rtol=2e-7, atol=1e-3 if dtype == torch.float16 else 0)


@needs_operators
def test_the_operators_compute_the_same_digits_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = AlibiEmbedding(16, 512)
    positions = torch.tensor([0, 1, 16, 70_000, 65_535, 511])
    lead, x = torch.randn(3, 48).bfloat16(), torch.randn(6, 5, 32).bfloat16()[:, 1:4]
    runtime.start(2)
    found = (*layer(positions), precede_heads(lead, x))
    monkeypatch.setattr(runtime, "active", lambda: False)
    monkeypatch.setattr(runtime, "runs", lambda *_: False)
    for ours, expected in zip(found, (*layer(positions), precede_heads(lead, x)), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("head_dim", [8, 12, 64, 80, 128])
def test_heads_with_their_biases_have_sizes_that_the_operators_take(head_dim: int) -> None:
    assert (head_dim + num_extra_dims(head_dim)) % 32 == 0
    assert num_extra_dims(head_dim) % 2 == 0


def test_mpt_has_the_slopes_of_its_authors_where_transformers_ignores_their_largest_exponent(tmp_path: Path) -> None:
    config = config_of(tmp_path, attn_config={"alibi_bias_max": 16})
    assert MptAttention.slopes(config).tolist() == [2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16]


@pytest.mark.parametrize(
    ("name", "value"), [("alibi", False), ("attn_type", "multiquery_attention"), ("prefix_lm", True), ("qk_ln", True)]
)
def test_an_option_of_mpt_that_transformers_ignores_is_refused(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{name} of attn_config of"):
        config_of(tmp_path, attn_config={name: value})


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("logit_scale", 0.5, "null"),
        ("logit_scale", "inv_sqrt_d_model", "null"),
        ("norm_type", "low_precision_rmsnorm", "low_precision_layernorm or layernorm"),
        ("no_bias", False, "true"),
    ],
)
def test_a_model_of_mpt_that_transformers_computes_otherwise_is_refused(
    name: str, value: object, wanted: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"{name} of .* must be {wanted}"):
        config_of(tmp_path, **{name: value})


def test_an_option_of_bloom_by_which_transformers_drops_biases_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, variant_of("BloomForCausalLM").family, slow_but_exact=True, pretraining_tp=2)
    with pytest.raises(CheckpointError, match=r"slow_but_exact of .* is true; it must be false"):
        ModelConfig.from_checkpoint(path)
    edit_json(path / "config.json", pretraining_tp=1)
    ModelConfig.from_checkpoint(path)


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", "MptForCausalLM"])
def test_attention_in_both_directions_is_refused(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, variant_of(architecture).family)
    config = ModelConfig.from_checkpoint(path, is_bidirectional=True)
    with pytest.raises(CheckpointError, match=f"asks for attention in both directions, which {architecture}"):
        load_model(path, config, dtype=torch.float32, device=torch.device("cpu"), progress=False)


def test_a_context_with_more_digits_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match="max_model_len is 131072, but ALiBi is computed for contexts of up to 65536"
    ):
        AlibiEmbedding(16, 1 << 17)


@pytest.mark.parametrize("name", ["transformer.", ""])
def test_bloom_loads_with_and_without_the_prefix_of_its_body(name: str, tmp_path: Path) -> None:
    """The first published checkpoints were saved without a head, and have no prefix."""
    from safetensors.torch import load_file, save_file

    path = make_checkpoint(tmp_path, variant_of("BloomForCausalLM").family)
    file = path / "model.safetensors"
    tensors = {name + key.removeprefix("transformer."): tensor for key, tensor in load_file(file).items()}
    reference = Reference(path)
    save_file(tensors, file, metadata={"format": "pt"})
    tokens = prompt(37)
    assert_computes(reference, tokens, PagedModel(path).logits(tokens))
