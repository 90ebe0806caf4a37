"""Keys, values and latents may be cached in fewer bits than the model's dtype."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.config.config import PrecisionConfig
from models.attention.cpu_cache import from_cache, to_cache
from tests.parity import quantized_checkpoints as q
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Row, assert_computes, distribution, prompt
from tests.parity.test_quantization import FORMATS, first_family
from tests.parity.test_worker_model_runner import runner_for
from tests.parity.tolerance import assert_within

KV_CASES = {
    ("LlamaForCausalLM", torch.float8_e4m3fn): 0.12,
    ("LlamaForCausalLM", torch.bfloat16): 0.008,
    ("Qwen3ForCausalLM", torch.float8_e4m3fn): 0.08,
    ("DeepseekV3ForCausalLM", torch.float8_e4m3fn): 0.12,
    ("DeepseekV3ForCausalLM", torch.bfloat16): 0.008,
    # Near a tie, rounding selects other tokens to attend to.
    ("DeepseekV32ForCausalLM", torch.float8_e4m3fn): 0.5,
    ("DeepseekV32ForCausalLM", torch.bfloat16): 0.05,
    ("GptOssForCausalLM", torch.float8_e4m3fn): 0.2,
}
"""By model and dtype of its cache, the mean absolute error that it may add to log probabilities of random weights."""


@pytest.mark.parametrize(("architecture", "kv_dtype"), KV_CASES)
def test_a_narrower_kv_cache_errs_within_bounds_and_alike_however_a_prompt_is_computed(
    tmp_path: Path, architecture: str, kv_dtype: torch.dtype
) -> None:
    path = make_checkpoint(tmp_path, first_family(architecture))
    tokens = prompt(90)
    exact = PagedModel(path).logits(tokens).log_softmax(-1)
    model = PagedModel(path, kv_dtype=kv_dtype)
    whole, bound = distribution(model, tokens)
    error = (whole - exact).abs().mean().item()
    assert 0 < error < KV_CASES[architecture, kv_dtype]
    # At any token, a number half-way between two cache values may be rounded to either.
    row = Row(tokens)
    pieces = [model.step([(row, count)])[0] for count in (33, 40)]
    pieces += [model.step([(row, 1)], num_decodes=1)[0] for _ in range(17)]
    assert_within(torch.cat(pieces).log_softmax(-1), whole, bound.max())


def test_values_beyond_the_range_of_fp8_saturate() -> None:
    stored = to_cache(torch.tensor([1e6, -1e6, 3.0]), torch.float8_e4m3fn, 2.0)
    assert from_cache(stored, torch.float32, 2.0).tolist() == [896.0, -896.0, 3.0]


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")],
)
def test_a_checkpoints_scales_of_the_kv_cache_are_taken(tmp_path: Path, k_name: str, v_name: str) -> None:
    """A model whose keys are too large for 8 bits runs with the scales, and not without them."""
    pair = q.write_pair(tmp_path, *FORMATS["quark fp8 channel"])
    layers = [f"model.layers.{layer}.self_attn" for layer in range(2)]

    def enlarge(tensors: q.Tensors) -> None:
        for layer in layers:
            tensors[f"{layer}.k_proj.weight_scale"] *= 512
            tensors[f"{layer}.q_proj.weight_scale"] /= 512

    q.change(pair.quantised, enlarge)
    tokens = prompt(60)
    logits = PagedModel(pair.quantised).logits(tokens)
    exact = logits.log_softmax(-1)
    without = PagedModel(pair.quantised, kv_dtype=torch.float8_e4m3fn).logits(tokens).log_softmax(-1)
    scales = {f"{layer}.{k_name}": torch.tensor(512.0) for layer in layers}
    scales |= {f"{layer}.{v_name}": torch.tensor([1.0]) for layer in layers}
    q.change(pair.quantised, lambda tensors: tensors.update(scales))
    assert_computes(PagedModel(pair.quantised), tokens, logits)
    scaled = PagedModel(pair.quantised, kv_dtype=torch.float8_e4m3fn).logits(tokens).log_softmax(-1)
    assert 0 < (scaled - exact).abs().mean() < 0.12 < (without - exact).abs().mean()


def test_scales_that_were_not_calibrated_count_as_1(tmp_path: Path) -> None:
    path = q.write_pair(tmp_path, *FORMATS["quark fp8 channel"]).quantised
    tokens = prompt(20)
    without = PagedModel(path, kv_dtype=torch.float8_e4m3fn).logits(tokens)
    scales = {"k_scale": torch.tensor(-1.0), "v_scale": torch.tensor(0.0)}
    q.change(path, lambda tensors: tensors.update({f"model.layers.0.self_attn.{k}": v for k, v in scales.items()}))
    assert torch.equal(PagedModel(path, kv_dtype=torch.float8_e4m3fn).logits(tokens), without)


@pytest.mark.parametrize("name", ["k_scale", "mla_attn.k_scale", "kv_a_proj_with_mqa.k_scale"])
def test_a_checkpoints_scale_of_latents_is_taken(tmp_path: Path, name: str) -> None:
    """Latents too large for 8 bits fit by the scale, however a prompt is computed."""
    experts = ("gate_proj", "up_proj", "down_proj")
    pair = q.write_pair(
        tmp_path,
        q.fp8_block,
        q.FP8_BLOCK_CONFIG,
        module=lambda module: module.endswith(experts),
        family=first_family("DeepseekV3ForCausalLM"),
    )
    path = pair.quantised

    def enlarge(tensors: q.Tensors) -> None:
        for name in tensors:
            if name.endswith("kv_a_layernorm.weight"):
                tensors[name] *= 2048
            if name.endswith("kv_b_proj.weight"):
                tensors[name] /= 2048

    q.change(path, enlarge)
    tokens = prompt(60)
    logits = PagedModel(path).logits(tokens)
    exact = logits.log_softmax(-1)
    without = PagedModel(path, kv_dtype=torch.float8_e4m3fn).logits(tokens).log_softmax(-1)
    layers = sorted({name.partition(".kv_a")[0] for name in load_file(path / "model.safetensors") if ".kv_a" in name})
    q.change(path, lambda tensors: tensors.update({f"{layer}.{name}": torch.tensor(32.0) for layer in layers}))
    assert_computes(PagedModel(path), tokens, logits)
    model = PagedModel(path, kv_dtype=torch.float8_e4m3fn)
    scaled, bound = distribution(model, tokens)
    error = (scaled - exact).abs().mean()
    assert 0 < error < (without - exact).abs().mean() / 2
    row = Row(tokens)
    pieces = [model.step([(row, 43)])[0]] + [model.step([(row, 1)], num_decodes=1)[0] for _ in range(17)]
    assert_within(torch.cat(pieces).log_softmax(-1), scaled, bound.max())


def test_an_8_bit_cache_has_blocks_of_a_quarter_of_float32s_bytes(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    sizes = {
        word: runner_for(path, quantization_config=PrecisionConfig(kv_cache_dtype=word)).caches.block_bytes
        for word in ("auto", "bf16", "fp8")
    }
    assert sizes["auto"] == 2 * sizes["bf16"] == 4 * sizes["fp8"]
