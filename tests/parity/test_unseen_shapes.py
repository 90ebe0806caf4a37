"""Random legal configurations of every architecture, in shapes that no variant has, compared with transformers.

transformers in float64 is the truth, and transformers in float32 says how large errors of float32 are: some of these
models amplify roundings so much that two correct implementations differ by more than 1e-4.

Configurations that transformers itself cannot build or run are skipped, and so are those that Kaon refuses in a
sentence.
"""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from models.errors import CheckpointError
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, Row, prompt
from tests.parity.tolerance import assert_as_exact, in_float64
from tests.parity.variants import Variant, all_variants

SEEDS, ATTEMPTS, STRIDE = 4, 24, 12
QUICK = ("CohereForCausalLM", "Llama4ForCausalLM", "LlamaForCausalLM", "MiMoV2FlashForCausalLM", "Qwen3MoeForCausalLM")
"""Number of attempts in the short form."""
_HEADS = (
    (64, 4, 2, 16),
    (48, 3, 1, 20),
    (80, 5, 5, 12),
    (56, 7, 7, 8),
    (72, 6, 2, 40),
    (96, 6, 3, 16),
    (40, 5, 1, 24),
)
"""Hidden size, query heads, KV heads, and head dimension."""
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Names of `make_checkpoint`'s arguments."""
_ORIGINAL = {"rope_theta": 1e4, "original_max_position_embeddings": 24}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    {"rope_type": "yarn", "factor": 3.0, **_ORIGINAL},
    {"rope_type": "yarn", "factor": 3.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.1, **_ORIGINAL},
    {"rope_type": "yarn", "factor": 3.0, "mscale": 0.7, "mscale_all_dim": 0.9, **_ORIGINAL},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ORIGINAL},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (309, 321, 515),
    "tie_word_embeddings": (False, True),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "qkv_bias": (False, True),
    "use_qk_norm": (False, True),
    "norm_topk_prob": (False, True),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "sliding_window": (3, 17, 33),
    "num_hidden_layers": (1, 3),
    "moe_intermediate_size": (20, 44),
    "rms_norm_eps": (1e-3, 1e-6),
    "layer_norm_eps": (1e-3, 1e-6),
    "num_experts_per_tok": (1, 2),
    "routed_scaling_factor": (1.0, 2.3),
    "rope_parameters": _ROPES,
}
_RARELY: dict[str, tuple[Any, ...]] = {
    "intermediate_size": (36, 97),
    "num_local_experts": (3, 5, 6),
    "num_experts": (3, 5, 9),
    "n_routed_experts": (6, 10, 12),
    "n_shared_experts": (0, 1, 2),
    "num_shared_experts": (0, 1, 2),
    "first_k_dense_replace": (0, 1, 3),
    "decoder_sparse_step": (1, 2, 3),
    "shared_expert_intermediate_size": (20, 52),
    "shared_intermediate_size": (20, 52),
    "use_sliding_window": (False, True),
    "max_window_layers": (0, 1, 2),
    "final_logit_softcapping": (None, 5.0),
    "attn_logit_softcapping": (None, 8.0),
    "query_pre_attn_scalar": (7, 24),
    "n_group": (1, 2),
    "q_lora_rank": (None, 24),
    "kv_lora_rank": (20, 48),
    "v_head_dim": (12, 28),
    "linear_conv_kernel_dim": (2, 3, 4),
    "mamba_d_conv": (2, 3, 4),
    "mamba_d_state": (10, 16),
    "rope_interleave": (False, True),
    "use_qkv_bias": (False, True),
    "residual_multiplier": (0.3, 1.0),
    "logits_scaling": (0.5, 3.0),
}
_BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")
_VARIANTS = all_variants()


def draw(variant: Variant, seed: int) -> dict[str, Any]:
    """The overrides of a variant with some of its configuration's fields set to other values."""
    chance = random.Random(f"{variant.architecture} {seed}")
    given = {**variant.family.defaults, **variant.overrides}
    made_of = variant.family.config_class
    # Some classes refuse a list of layers whose length differs from their default number of layers.
    config = made_of(**{name: value for name, value in _SIZES.items() if hasattr(made_of, name)} | given).to_dict()
    found = dict(variant.overrides)
    for name, values in _CHOICES.items():
        # Ropes by kind of layer stay unchanged.
        is_flat = name != "rope_parameters" or not any(
            isinstance(each, dict) for each in config.get(name, {}).values()
        )
        if name in config and is_flat and chance.random() < 0.4:
            found[name] = chance.choice(values)
    for name, values in _RARELY.items():
        if name in config and chance.random() < 0.2:
            found[name] = chance.choice(values)
    if chance.random() < 0.5:
        size, heads, kv_heads, head_dim = chance.choice(_HEADS)
        has_latents = config.get("kv_lora_rank") is not None
        shape = {
            "hidden_size": size,
            "num_attention_heads": heads,
            "num_key_value_heads": heads if has_latents else kv_heads,
        }
        found |= shape if has_latents or "head_dim" not in config else {**shape, "head_dim": head_dim}
    for name in _BY_LAYER:
        if name in given and isinstance(given[name], list):
            count = found.get("num_hidden_layers", given.get("num_hidden_layers", len(given[name])))
            in_turn = (given[name] * count)[:count]
            found[name] = in_turn if chance.random() < 0.5 else chance.choices(given[name], k=count)
    return found


def leave_out(directory: Path, variant: Variant, seed: int) -> None:
    """Rewrite config.json as other versions of transformers do: without defaults, or with an older rope."""
    chance, path = random.Random(f"{variant.architecture} {seed}"), directory / "config.json"
    config = json.loads(path.read_text())
    if chance.random() < 0.4:
        defaults: dict[str, Any] = {}
        with suppress(Exception):  # Some classes refuse their own defaults.
            defaults = variant.family.config_class().to_dict()
        config = {name: value for name, value in config.items() if name in _NAMED or defaults.get(name, ...) != value}
    rope = config.get("rope_parameters")
    if chance.random() < 0.4 and rope and not any(isinstance(each, dict) for each in rope.values()):
        del config["rope_parameters"]
        config |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    path.write_text(json.dumps(config))


_NAMED = ("architectures", "model_type", "dtype")
"""Fields that every config.json has."""


@pytest.mark.parametrize(
    ("architecture", "seed"),
    [
        pytest.param(name, seed, marks=() if name in QUICK and seed == 0 else pytest.mark.slow)
        for name in sorted({each.architecture for each in _VARIANTS})
        for seed in range(SEEDS)
    ],
)
def test_shapes_that_no_variant_has_are_computed_as_transformers_does(
    architecture: str, seed: int, tmp_path: Path
) -> None:
    own = [each for each in _VARIANTS if each.architecture == architecture]
    variant, tokens = own[seed % len(own)], prompt(75, seed=seed)
    for attempt in range(ATTEMPTS):
        directory = tmp_path / str(attempt)
        try:
            make_checkpoint(directory, variant.family, **draw(variant, STRIDE * seed + attempt))
            leave_out(directory, variant, STRIDE * seed + attempt)
            reference = Reference(directory)
            expected = reference.logits(tokens).log_softmax(-1)
        except Exception:  # noqa: BLE001, transformers' code may raise anything for what it cannot be
            continue
        try:
            model = PagedModel(directory, model_impl="kaon")
            break
        except CheckpointError:
            continue
    else:
        pytest.fail(f"none of {ATTEMPTS} configurations can be computed by both")
    row = Row(tokens)
    parts = [model.step([(row, count)])[0] for count in (13, 30)]
    while row.computed < len(tokens):
        parts += model.step([(row, 1)], num_decodes=1)
    model.release(row)
    exact = in_float64(reference.model, lambda: reference.logits(tokens).log_softmax(-1))
    for found in (model.logits(tokens), torch.cat(parts)):
        assert_as_exact(found.log_softmax(-1), expected, exact)
