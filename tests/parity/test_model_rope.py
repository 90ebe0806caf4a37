"""Every Hugging Face rope type: frequencies and attention factors of transformers, and the whole model's results."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.config.fields import Fields
from models.config.rope import RopeConfig, parse_rope
from models.layers.rotary import RotaryEmbedding, inverse_frequencies
from models.ops.torch_ops import rotate
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, assert_computes, prompt
from tests.sweeps import some

HEAD_DIM = 16
SHORT = [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)]
LONG = [1.5 + 0.5 * i for i in range(HEAD_DIM // 2)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 100,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn with two scales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn with its own attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
    "yarn without a range": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 1.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
    },
    "longrope with factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 4.0,
        "attention_factor": 1.1,
        "original_max_position_embeddings": 64,
    },
}


def transformers_frequencies(
    parameters: dict[str, Any], seq_len: int, *, max_position_embeddings: int = 256
) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=seq_len)


def parsed(config: dict[str, Any], *, max_position_embeddings: int = 256) -> RopeConfig:
    fields = Fields(config, "config.json")
    return parse_rope(fields, head_dim=HEAD_DIM, max_position_embeddings=max_position_embeddings)


@pytest.mark.parametrize("name", [name for name in ROPES if name != "default"])
@pytest.mark.parametrize("served", [64, 256])
def test_frequencies_and_attention_factor_are_those_of_transformers(name: str, served: int) -> None:
    expected, attention_factor = transformers_frequencies(ROPES[name], served)
    rope = parsed({"rope_parameters": {"rope_theta": 10000.0, **ROPES[name]}})
    torch.testing.assert_close(inverse_frequencies(rope, served), expected, atol=0.0, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("served", [100, 256, 257, 1024])
def test_dynamic_frequencies_are_those_of_a_sequence_of_the_served_length(served: int) -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0}
    expected, _ = transformers_frequencies(parameters, served)
    rope = parsed({"rope_theta": 10000.0, "rope_scaling": parameters})
    torch.testing.assert_close(inverse_frequencies(rope, served), expected, atol=0.0, rtol=1e-6)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("family", some(["llama", "qwen3"], "llama"))
def test_models_with_each_rope_type_compute_what_transformers_computes(tmp_path: Path, family: Any, name: str) -> None:
    """Also beyond the original context. Only Phi-3 is computed again by transformers when `longrope` passes it."""
    path = make_checkpoint(
        tmp_path, family, max_position_embeddings=256, rope_parameters={"rope_theta": 10000.0, **ROPES[name]}
    )
    model, reference = PagedModel(path), Reference(path)
    tokens = prompt(120)
    assert_computes(reference, tokens, model.logits(tokens))
    found = [model.greedy(tokens, 32)]
    assert found == reference.argmax_tokens([tokens], found)


def test_longrope_served_within_its_original_context_uses_the_short_factors(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path, max_position_embeddings=256, rope_parameters=ROPES["longrope"] | {"rope_theta": 1e4}
    )
    model, reference = PagedModel(path, max_model_len=64), Reference(path)
    assert_computes(reference, prompt(64), model.logits(prompt(64)))
    found = [model.greedy(prompt(24), 40)]
    assert found == reference.argmax_tokens([prompt(24)], found)


def test_dynamic_scaling_agrees_with_prompts_of_any_length(tmp_path: Path) -> None:
    parameters = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
    path = make_checkpoint(tmp_path, max_position_embeddings=64, rope_parameters=parameters)
    for served in (64, 128):
        model = PagedModel(path, max_model_len=served)
        for length in (7, 60, 64, 65, 100, 128):
            if length <= served:
                assert_computes(Reference(path), prompt(length), model.logits(prompt(length)))


@pytest.mark.parametrize("name", [*ROPES, "dynamic"])
def test_the_older_spelling_means_the_same(name: str) -> None:
    parameters = ROPES.get(name, {"rope_type": "dynamic", "factor": 2.0})
    older = {"type" if key == "rope_type" else key: value for key, value in parameters.items()}
    new = parsed({"rope_parameters": {"rope_theta": 5e5, **parameters}})
    assert parsed({"rope_theta": 5e5, "rope_scaling": older}) == new


def test_only_the_leading_share_of_a_head_turns() -> None:
    rope = parsed({"partial_rotary_factor": 0.5})
    assert rope.rotary_dim == 8
    x = torch.randn(5, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, *RotaryEmbedding(rope, 256)(torch.arange(5)))
    whole = rotate(x[..., :8], *RotaryEmbedding(rope, 256)(torch.arange(5)))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], whole)
    assert not torch.equal(turned[1:, :, :8], x[1:, :, :8])


def test_angles_are_as_exact_at_a_million_as_at_zero() -> None:
    rope = parsed({})
    cos, _ = RotaryEmbedding(rope, 256)(torch.tensor([1_000_000]))
    assert cos[0, 0, 0] == pytest.approx(math.cos(1_000_000), abs=1e-6)


def test_a_checkpoint_saved_by_transformers_4_loads_the_same(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path, max_position_embeddings=256, rope_parameters={"rope_theta": 1e4, **ROPES["llama3"]}
    )
    newer = PagedModel(path)
    edit_json(
        path / "config.json",
        rope_parameters=None,
        dtype=None,
        rope_theta=1e4,
        rope_scaling=ROPES["llama3"],
        torch_dtype="float32",
    )
    assert PagedModel(path).config == newer.config
