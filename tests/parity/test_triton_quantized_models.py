"""Models whose weights stay quantised for the kernels, compared with their dequantised weights."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from triton.runtime.interpreter import InterpretedFunction

from models.attention.triton import TritonAttentionBackend
from models.loading.checkpoint import read_checkpoint_config
from models.loading.loader import load_model
from models.ops import triton
from models.ops.self_test import Problems
from models.ops.stored_weight import stored_of
from models.ops.triton.cases.quantized_products import as_multiplied, part_of
from models.ops.triton.quantized_products import quantized_linear
from models.ops.weight_formats import FourBitWeight, FP8Weight
from models.parallel.tensor_parallel import SINGLE_RANK, ExpertParallel, TensorParallel
from tests.parity import quantized_checkpoints as q
from tests.parity.checkpoints import Family
from tests.parity.paged_model import PagedModel, prompt
from tests.parity.test_model_sharding import ranks
from tests.parity.test_quantization import FORMATS
from tests.parity.thread_ranks import Meeting, ThreadExchange
from tests.parity.triton_interpreter import DEVICE, requires_interpreter, triton_kernels  # noqa: F401, a fixture
from tests.parity.variants import all_variants
from tests.sweeps import some

pytestmark = [requires_interpreter, pytest.mark.usefixtures("triton_kernels")]
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 2}
STAYING = (
    "fp8 a scale a tensor",
    "fp8 blocks",
    "fbgemm",
    "compressed-tensors int8 and rounded inputs",
    "compressed-tensors int4 groups",
    "compressed-tensors int4 groups, zero points",
    "quark mxfp4",
    "awq",
    "gptq, zero points",
    "gptq, one group",
)
"""A subset of `FORMATS`, one for each layout that has a kernel."""


def run(path: Path) -> tuple[torch.Tensor, int]:
    """Logits, and the number of weights that stayed quantised."""
    model = PagedModel(path)
    triton.leave_to_torch(frozenset({"norm", "activation"}))
    stored = [parameter for parameter in model.model.parameters() if stored_of(parameter) is not None]
    found = model.logits(prompt(5))
    triton.leave_to_torch(frozenset())
    return found, len(stored)


def assert_near(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Activations are rounded to FP8, or to integers, if weights are."""
    is_rounded = "fp8" in name or name == "fbgemm" or "rounded inputs" in name
    assert (found - expected).norm() <= (0.1 if is_rounded else 1e-4) * expected.norm()


@pytest.mark.parametrize(
    "name",
    some(STAYING, "fp8 blocks", "compressed-tensors int8 and rounded inputs", "quark mxfp4", "gptq, zero points"),
)
def test_weights_stay_as_they_are_stored(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantize, config = FORMATS[name]
    pair = q.write_pair(tmp_path, quantize, config, **SHAPE)
    (found, stored), (expected, dense) = run(pair.quantised), run(pair.dense)
    assert dense == 0
    assert stored == 2 * 4  # Two layers of qkv, o, gate and up, down.
    assert "made dense" not in caplog.text
    assert_near(found, expected, name)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("mxfp8", "fp8 with scales per block"),
        ("compressed-tensors int8 channel", "int8 with scales per channel"),
        ("gptq, activation order", "int4 with groups of 32 in the order of activations with zero points"),
        ("compressed-tensors nvfp4", "nvfp4 with groups of 16"),
    ],
)
def test_weights_that_do_not_stay_as_they_are_stored_are_logged(
    name: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In one sentence, by format."""
    PagedModel(q.write_pair(tmp_path, *FORMATS[name]).quantised)
    [line] = [record.getMessage() for record in caplog.records if "made dense" in record.getMessage()]
    assert line.endswith(f": 14 in {form}, no kernel multiplies them")


@pytest.mark.parametrize(
    ("name", "quantised", "kinds"),
    [
        ("fp8 blocks", ("q_proj", "v_proj"), {"qkv_proj": ["fp8", None, "fp8"]}),
        ("awq", ("k_proj", "gate_proj"), {"qkv_proj": [None, "int4", None], "gate_up_proj": ["int4", None]}),
    ],
)
def test_parts_of_a_weight_stay_as_they_are_stored_where_others_are_dense(
    name: str, quantised: tuple[str, ...], kinds: dict[str, list[str | None]], tmp_path: Path
) -> None:
    quantize, config = FORMATS[name]
    pair = q.write_pair(tmp_path, quantize, config, module=lambda module: module.endswith(quantised), **SHAPE)
    (found, stored), (expected, _) = run(pair.quantised), run(pair.dense)
    assert stored == 2 * len(kinds)  # Two layers.
    assert_near(found, expected, name)
    models = [PagedModel(path).model for path in pair]
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        weight = stored_of(ours)
        torch.testing.assert_close(ours.data if weight is None else weight.dense(), theirs.data)
    found_kinds = {
        at.split(".")[-2]: [part.kind for part in weight.parts]
        for at, parameter in models[0].named_parameters()
        if (weight := stored_of(parameter)) is not None
    }
    assert found_kinds == kinds


def test_parts_of_a_weight_may_be_of_two_formats(tmp_path: Path) -> None:
    """Queries in groups of 32, keys in MXFP4, values dense."""
    groups = q.compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32)
    mxfp4 = FORMATS["compressed-tensors mxfp4"]
    own = {"targets": ["re:.*k_proj"], "format": "mxfp4-pack-quantized"}
    groups["config_groups"]["keys"] = mxfp4[1]["config_groups"]["group_0"] | own
    groups["ignore"] = ["re:.*v_proj", "lm_head"]
    quantised = ("q_proj", "k_proj")
    pair = q.write_pair(
        tmp_path,
        q.pack_quantized(),
        groups,
        module=lambda module: module.endswith(quantised),
        by_leaf={"k_proj": mxfp4[0]},
        **SHAPE,
    )
    model = PagedModel(pair.quantised).model
    stored = [weight for parameter in model.parameters() if (weight := stored_of(parameter)) is not None]
    assert [[part.kind for part in weight.parts] for weight in stored] == [["int4", "mxfp4", None]] * 2
    (found, _), (expected, _) = run(pair.quantised), run(pair.dense)
    assert_near(found, expected, "")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches by kernel."""
    names: Counter[str] = Counter()
    launch = InterpretedFunction.__getitem__

    def noted(self: Any, grid: Any) -> Any:
        names[self.__name__] += 1
        return launch(self, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", noted)
    return names


@pytest.mark.parametrize(
    ("architecture", "alone", "fused"),
    [
        # For each of two layers: q, k and v; o; gate and up; down. Attention computes o's input, and rounds nothing.
        ("LlamaForCausalLM", 8, 2),
        # q_a and kv_a read one norm, and q_b that of the queries' latents. The second layer has experts, which read
        # one norm together with the shared ones and whose second product rounds its own rows.
        ("DeepseekV3ForCausalLM", 12, 3),
        # For each of three layers, with norms before and after attention and the feed-forward layer.
        pytest.param("Gemma2ForCausalLM", 12, 3, marks=pytest.mark.slow),
        # A shared expert with a gate.
        pytest.param("Qwen2MoeForCausalLM", 12, 4, marks=pytest.mark.slow),
    ],
)
def test_norms_and_activations_round_what_a_product_in_fp8_reads(
    architecture: str, alone: int, fused: int, launched: Counter[str], tmp_path: Path
) -> None:
    """The same bits with fewer launches."""
    quantize, config = FORMATS["fp8 blocks"]
    family = "llama" if architecture.startswith("Llama") else family_of(architecture)
    shape = SHAPE if family == "llama" else {}
    path = q.write_pair(tmp_path, quantize, config, family=family, **shape).quantised  # type: ignore[arg-type]
    model = PagedModel(path)
    tokens = prompt(5)
    found = model.logits(tokens)
    counts = Counter(launched)
    launched.clear()
    for module in model.model.modules():  # type: ignore[attr-defined]
        if getattr(module, "feed", None) is not None:
            module.feed = None
    assert torch.equal(model.logits(tokens), found)
    assert (launched.pop("quantize_groups_kernel"), counts.pop("quantize_groups_kernel")) == (alone, fused)
    assert counts == launched


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        # For each of two layers: two norms, which add; the norms of queries and keys, the rotation and the store; the
        # activation; the rounding of the last product's input in attention. Then the last norm.
        ("Qwen3ForCausalLM", {"rms_norm": 5, "store": 2, "gated": 2, "quantize_groups": 2}),
        # Experts gate in their first product, and their second one rounds its rows.
        ("Qwen3MoeForCausalLM", {"rms_norm": 5, "store": 2, "quantize_groups": 4}),
        # The first layer has no experts; the second one's shared experts have the same input as the others.
        ("Glm4MoeForCausalLM", {"rms_norm": 5, "store": 2, "gated": 2, "quantize_groups": 3}),
        # Each layer has one more norm, of the queries' latents.
        ("DeepseekV3ForCausalLM", {"rms_norm": 7, "latent_store": 2, "gated": 2, "quantize_groups": 3}),
        # MXFP4 multiplies unrounded rows.
        ("GptOssForCausalLM", {"rms_norm": 5, "store": 2}),
    ],
)
def test_what_a_layer_launches_besides_products_and_attention(
    architecture: str, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counting, without computing."""
    family = family_of(architecture)
    if architecture == "GptOssForCausalLM":
        path = q.write_gpt_oss_pair(tmp_path, family, hidden_size=64, intermediate_size=64).quantised
    else:
        path = q.write_pair(tmp_path, *FORMATS["fp8 blocks"], family=family, num_hidden_layers=2).quantised
    model = PagedModel(path, backend=TritonAttentionBackend(DEVICE))
    names: Counter[str] = Counter()
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *_, **__: names.update([self.__name__.removesuffix("_kernel")])
    )
    model.logits(prompt(5))
    kinds = ("rms_norm", "store", "latent_store", "gated", "activated", "quantize_groups")
    assert {name: names[name] for name in kinds if names[name]} == expected


def test_weights_become_dense_where_torch_is_to_compute_them(tmp_path: Path) -> None:
    triton.leave_to_torch(frozenset({"linear"}))
    quantize, config = FORMATS["awq"]
    model = PagedModel(q.write_pair(tmp_path, quantize, config, **SHAPE).quantised)
    assert all(stored_of(parameter) is None for parameter in model.model.parameters())


def family_of(architecture: str) -> Family:
    return next(variant.family for variant in all_variants() if variant.architecture == architecture)


def is_expert(module: str) -> bool:
    return ".experts." in module


def write_experts(directory: Path, architecture: str, name: str, **fields: int) -> q.Pair:
    """A model in which only experts are quantised, whatever its configuration says."""
    quantize, config = FORMATS[name]
    return q.write_pair(directory, quantize, config, module=is_expert, family=family_of(architecture), **fields)


@pytest.mark.parametrize(
    ("architecture", "name", "fields"),
    [
        ("Qwen3MoeForCausalLM", "fp8 blocks", {"moe_intermediate_size": 40, "num_hidden_layers": 1}),
        ("Qwen3MoeForCausalLM", "gptq, zero points", {"moe_intermediate_size": 64, "num_hidden_layers": 1}),
        (
            "Qwen3MoeForCausalLM",
            "compressed-tensors int8 and rounded inputs",
            {"moe_intermediate_size": 40, "num_hidden_layers": 1},
        ),
        pytest.param("MixtralForCausalLM", "awq", {"intermediate_size": 64}, marks=pytest.mark.slow),
        pytest.param("MixtralForCausalLM", "quark mxfp4", {"intermediate_size": 64}, marks=pytest.mark.slow),
        pytest.param("Glm4MoeForCausalLM", "fp8 a scale a tensor", {}, marks=pytest.mark.slow),
    ],
)
def test_experts_stay_as_they_are_stored(architecture: str, name: str, fields: dict[str, int], tmp_path: Path) -> None:
    pair = write_experts(tmp_path, architecture, name, **fields)
    model = PagedModel(pair.quantised).model
    stored = [name for name, weight in model.named_parameters() if stored_of(weight) is not None]
    assert {name.rpartition(".")[2] for name in stored} == {"w13", "w2"}
    (found, _), (expected, dense) = run(pair.quantised), run(pair.dense)
    assert dense == 0
    assert_near(found, expected, name)


def test_experts_that_transformers_stacked_stay_as_they_are_stored(tmp_path: Path) -> None:
    path = write_experts(tmp_path, "Qwen3MoeForCausalLM", "fp8 blocks", moe_intermediate_size=40).quantised
    alone = stacks_of(path)
    leaves = {"weight": "", "weight_scale_inv": "_scale_inv"}
    q.stack_experts(path, ("gate_proj", "up_proj"), "gate_up_proj", leaves=leaves)
    q.stack_experts(path, ("down_proj",), "down_proj", leaves=leaves)
    for found, expected in zip(stacks_of(path), alone, strict=True):
        stored, stored_alone = stored_of(found), stored_of(expected)
        assert stored is not None
        assert stored_alone is not None
        assert torch.equal(stored.dense(), stored_alone.dense())


def stacks_of(path: Path, parallel: TensorParallel = SINGLE_RANK) -> list[nn.Parameter]:
    config = read_checkpoint_config(path, "auto")
    model = load_model(path, config, dtype=torch.float32, device=DEVICE, progress=False, parallel=parallel)
    return [weight for name, weight in model.named_parameters() if name.rpartition(".")[2] in ("w13", "w2")]


@pytest.mark.parametrize("name", ["fp8 blocks", "compressed-tensors int8 and rounded inputs"])
def test_other_experts_stay_as_they_are_stored_where_one_of_them_is_dense(name: str, tmp_path: Path) -> None:
    """Half of the first weight of expert 2 of the first layer is dense, and so the whole weight."""

    def module(name: str) -> bool:
        return is_expert(name) and not name.endswith("layers.0.mlp.experts.2.up_proj")

    quantize, config = FORMATS[name]
    pair = q.write_pair(
        tmp_path, quantize, config, module=module, family=family_of("Qwen3MoeForCausalLM"), moe_intermediate_size=40
    )
    found, expected = stacks_of(pair.quantised), stacks_of(pair.dense)
    kind = "fp8" if name == "fp8 blocks" else "int8"
    stored = [stored_of(weight) for weight in found]
    assert [[part.kind for part in weight.parts] for weight in stored if weight is not None] == [
        [kind, None],
        *[[kind]] * (len(found) - 1),
    ]
    for weight, theirs in zip(stored, expected, strict=True):
        assert weight is not None
        torch.testing.assert_close(weight.dense(), theirs.data)
    assert_near(run(pair.quantised)[0], run(pair.dense)[0], name)


@pytest.mark.parametrize(
    ("architecture", "name", "size"),
    [
        # The second of two ranks begins within the first group of 128.
        ("Qwen3MoeForCausalLM", "fp8 blocks", 192),
        # Half of 64 inputs are one run of 32, and two runs share their bytes.
        ("Qwen3MoeForCausalLM", "gptq, zero points", 64),
        # The second of two ranks begins within a group of 64.
        ("Qwen3MoeForCausalLM", "gptq, one group", 320),
        # Groups of 32, within which each rank begins or ends.
        ("MixtralForCausalLM", "quark mxfp4", 192),
        ("GptOssForCausalLM", "gpt-oss", 192),
    ],
)
def test_weights_stay_as_they_are_stored_where_ranks_cut_groups(
    architecture: str, name: str, size: int, tmp_path: Path
) -> None:
    family = family_of(architecture)
    if name == "gpt-oss":
        pair = q.write_gpt_oss_pair(tmp_path, family, hidden_size=64, intermediate_size=size)
    else:
        field = "intermediate_size" if architecture.startswith("Mixtral") else "moe_intermediate_size"
        pair = write_experts(tmp_path, architecture, name, **{field: size, "num_hidden_layers": 1})
    for parallel in ranks(4 if size % 4 == 0 and "mxfp4" in name else 2):
        found, expected = stacks_of(pair.quantised, parallel), stacks_of(pair.dense, parallel)
        for ours, theirs in zip(found, expected, strict=True):
            stored = stored_of(ours)
            assert stored is not None
            torch.testing.assert_close(stored.dense(), theirs.data)
            operand = stored.operand
            assert isinstance(operand, FP8Weight | FourBitWeight)
            assert operand.shape == theirs.shape
            x = Problems(DEVICE).normal(3, operand.shape[-1], dtype=torch.bfloat16)
            products = quantized_linear(x, operand.part(1))
            exact = as_multiplied(x, operand) @ part_of(operand, 1, torch.bfloat16).T
            torch.testing.assert_close(products.float(), exact, rtol=2**-7, atol=float(exact.abs().max()) * 2**-8)


def test_experts_of_gpt_oss_stay_as_they_are_stored(tmp_path: Path) -> None:
    family = family_of("GptOssForCausalLM")
    pair = q.write_gpt_oss_pair(tmp_path, family, hidden_size=64, intermediate_size=64)
    model = PagedModel(pair.quantised)
    weights = [name for name, weight in model.model.named_parameters() if stored_of(weight) is not None]
    assert {name.rpartition(".")[2] for name in weights} == {"w13", "w2"}
    (found, _), (expected, _) = run(pair.quantised), run(pair.dense)
    assert_near(found, expected, "gpt-oss")


def test_experts_stay_as_they_are_stored_where_replicas_share_them(tmp_path: Path) -> None:
    family = family_of("GptOssForCausalLM")
    path = q.write_gpt_oss_pair(tmp_path, family, hidden_size=64, intermediate_size=64).quantised
    parallel = TensorParallel(experts=ExpertParallel(1, 2, ThreadExchange(Meeting(2), 1)))
    stacks = stacks_of(path, parallel)
    assert stacks
    assert all(stored_of(weight) is not None for weight in stacks)
