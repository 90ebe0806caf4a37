"""Quantised checkpoints on a CPU: computed as stored, by AMX bit for bit like their dequantised weights."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.layers.moe import FusedMoE
from models.layers.parameter import packed_of
from models.ops.cpu import dense as ops
from models.ops.cpu import runtime
from models.ops.cpu.packed_weight import CodedWeight, PackedWeight
from models.ops.weight_formats import Codes
from tests.parity import quantized_checkpoints as q
from tests.parity.paged_model import PagedModel, Row, prompt
from tests.parity.random_codes import KINDS, assert_same_products, is_exact, random_codes
from tests.parity.test_cpu_operators import PATHS
from tests.parity.test_quantization import FORMATS, OF_EACH_LAYOUT, deepseek_v4_as_published, first_family
from tests.parity.thread_ranks import at_once, thread_ranks
from tests.sweeps import some

LOADED = runtime.load_library()
pytestmark = pytest.mark.skipif(
    LOADED is None, reason="the operators were not built: install again where there is a C compiler"
)


@pytest.fixture(params=PATHS, ids=runtime.INSTRUCTION_SETS.__getitem__)
def each_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """The operators on two threads, with an instruction set that this processor supports."""
    runtime.start(2, request.param)
    yield
    runtime.stop()


@pytest.mark.parametrize(("kind", "width", "dtype"), KINDS)
@pytest.mark.usefixtures("each_path")
def test_products_are_those_of_the_weight_that_is_meant(kind: str, width: int, dtype: torch.dtype) -> None:
    """Few rows, several groups, and as many as make the operator convert the whole weight to bfloat16 first."""
    outputs, inputs = 72, 4096 + 64
    codes, meant = random_codes(kind, width, dtype, outputs, inputs)
    coded, packed = CodedWeight(outputs, inputs), PackedWeight(outputs, inputs)
    packed.put(0, meant)
    for first, last in ((40, 72), (0, 40)):
        part = codes.part(0, first, last)
        assert part is not None
        assert coded.accepts(part)
        coded.put_codes(first, part)
    assert coded.memory.nbytes < 0.55 * packed.memory.nbytes * (2 if "8" in kind else 1)
    bias, most = torch.randn(outputs).bfloat16(), torch.randn(250, inputs).bfloat16()
    found = ops.linear(most, coded, bias)
    assert_same_products(found, ops.linear(most, packed, bias), most, meant)
    for rows in (1, 2, 17, 100):
        assert torch.equal(ops.linear(most[:rows], coded, bias), found[:rows]), "a row does not depend on others"
    assert torch.equal(ops.dequantized(coded).memory, packed.memory)


@pytest.mark.usefixtures("each_path")
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("kinds", [("int4", "symmetric int4"), ("symmetric int4", "int4")])
def test_zero_points_are_stored_from_the_first_rows_on_that_need_them(kinds: tuple[str, str], width: int) -> None:
    outputs, inputs = 80, 96
    coded, packed, symmetric = (
        CodedWeight(outputs, inputs),
        PackedWeight(outputs, inputs),
        CodedWeight(outputs, inputs),
    )
    for first, kind in zip((0, 40), kinds, strict=True):
        rows, meant = random_codes(kind, width, torch.float16, 40, inputs)
        assert coded.accepts(rows)
        coded.put_codes(first, rows)
        packed.put(first, meant)
        if kind == "symmetric int4":
            symmetric.put_codes(first, rows)
    assert torch.equal(ops.dequantized(coded).memory, packed.memory)
    assert symmetric.memory.nbytes == coded.memory.nbytes - 3 * -(-inputs // width) * 32


def exact_codes(kind: str, rows: int, inputs: int, width: int) -> tuple[Codes, torch.Tensor]:
    """Codes of all values whose scales are powers of two, so that bfloat16 represents their numbers on every path."""
    codes, _ = random_codes(kind, width, torch.uint8 if kind == "mxfp4" else torch.float32, rows, inputs)
    scales = torch.randint(125, 130, codes.scales.shape, dtype=torch.uint8)
    powers = torch.exp2(scales.float() - 127)
    numbers = codes.codes.float()
    if kind == "mxfp4":
        numbers = torch.cat((q.E2M1, -q.E2M1))[codes.codes.long()]
    elif codes.zeros is not None:
        numbers = numbers - codes.zeros.float().repeat_interleave(width, 1)
    meant = numbers * powers.repeat_interleave(width, 1)
    return replace(codes, scales=scales if kind == "mxfp4" else powers), meant.double()


@pytest.mark.usefixtures("each_path")
@pytest.mark.parametrize("kind", ["int4", "mxfp4", "int8", "fp8"])
def test_inputs_are_exact_but_those_far_below_the_largest_of_32(kind: str) -> None:
    """Those from a 128th of it on are exact, others within 2**-15 of it; what else differs is the order of sums."""
    outputs, inputs, width = 40, 256, 128 if kind == "fp8" else 32
    codes, meant = exact_codes(kind, outputs, inputs, width)
    coded = CodedWeight(outputs, inputs)
    coded.put_codes(0, codes)
    x = (torch.rand(6, inputs) * 0.98 + 1 / 64).mul(torch.randn(6, inputs).sign()).bfloat16()
    error = (ops.linear(x, coded, dtype=torch.float32).double() - x.double() @ meant.T).abs()
    sizes = x.double().abs() @ meant.abs().T
    assert (error <= 2**-22 * sizes).all()
    x[:, 5::32] *= 1000
    error = (ops.linear(x, coded, dtype=torch.float32).double() - x.double() @ meant.T).abs()
    largest = x.double().abs().unflatten(1, (-1, 32)).amax(-1).repeat_interleave(32, 1)
    assert (error <= 2**-15 * (largest @ meant.abs().T) + 2**-22 * (x.double().abs() @ meant.abs().T)).all()


@pytest.mark.usefixtures("each_path")
@pytest.mark.parametrize("kind", ["int4", "mxfp4", "int8"])
def test_a_massive_activation_costs_its_neighbours_less_than_bfloat16_costs(kind: str) -> None:
    """An input of 1024, the largest number of 32 with the fewest bits for others, among 4096 of size 1.

    All neighbours together lose an eighth of what a bfloat16 of that size may be rounded by; and where its weight is
    0, the error is less than a step of the result's bfloat16."""
    rows, inputs, massive = 16, 4096, 1024.0
    codes, meant = exact_codes(kind, 40, inputs, 32)
    coded = CodedWeight(40, inputs)
    coded.put_codes(0, codes)
    x = torch.randn(rows, inputs).bfloat16()
    x[:, 5] = massive
    exact = x.double() @ meant.T
    error = (ops.linear(x, coded, dtype=torch.float32).double() - exact).norm()
    of_massive = massive * meant[:, 5].expand(rows, -1)
    assert error < 2**-9 * of_massive.norm() / 8
    assert error < 2**-8 * (exact - of_massive).norm()


@pytest.mark.usefixtures("each_path")
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38, 1e-38, 0.0])
def test_rows_of_extreme_values_stay_apart_from_others(value: float) -> None:
    codes, _ = random_codes("int8", 32, torch.float16, 40, 96)
    coded = CodedWeight(40, 96)
    coded.put_codes(0, codes)
    x = torch.randn(5, 96).bfloat16()
    expected = ops.linear(x, coded)
    x[2] = value
    found = ops.linear(x, coded, dtype=torch.float32)
    others = [0, 1, 3, 4]
    assert torch.equal(found[others].bfloat16(), expected[others])
    assert torch.isfinite(found[2]).all() == (value < 1e30)
    if value < 1e-30:
        assert (found[2].abs() < 1e-30).all()


@pytest.mark.usefixtures("each_path")
def test_experts_are_multiplied_by_their_own_codes() -> None:
    experts, outputs, inputs = 3, 64, 96
    coded, packed = CodedWeight(experts * outputs, inputs), PackedWeight(experts * outputs, inputs)
    codes, meant = random_codes("int4", 32, torch.float16, experts * outputs, inputs)
    coded.put_codes(0, codes)
    packed.put(0, meant)
    x, counts = torch.randn(60, inputs).bfloat16(), torch.tensor([50, 0, 4])
    tokens = torch.randint(0, 60, (60,))
    found, expected = (ops.grouped_linear(x, each, None, counts, tokens=tokens) for each in (coded, packed))
    assert_same_products(found, expected, x[tokens], meant)
    by_group = x.view(20, experts, inputs)
    runs = ops.grouped_linear(by_group.transpose(0, 1).reshape(60, inputs), coded, None, torch.tensor([20] * experts))
    expected = runs.view(experts, 20, outputs).transpose(0, 1).reshape(20, -1)
    assert torch.equal(ops.linear_by_group(by_group, coded, outputs), expected)


def is_coded(model: PagedModel) -> list[bool]:
    """Whether each weight of projections keeps its stored codes."""
    weights = [packed_of(each) for name, each in model.model.named_parameters() if "embed" not in name]
    return [isinstance(each, CodedWeight) for each in weights if each is not None]


def assert_same_logits(pair: q.Pair, *, is_reordered: bool = False) -> list[bool]:
    """Assert that both give the same bits, for a prompt and for one token; where sums have another order, nearly the
    same, by the same experts."""
    found, expected = (PagedModel(path, dtype=torch.bfloat16) for path in pair)
    is_near = is_reordered or not is_exact()
    if is_near:
        use_experts_of(expected, found)
    tokens = prompt(40)
    for length in (len(tokens), 1):
        [wanted], [logits] = (model.step([(Row(list(tokens[:length])), length)]) for model in (expected, found))
        if is_near:
            assert (logits - wanted).norm() < 0.02 * wanted.norm()
        else:
            assert torch.equal(logits, wanted)
    return is_coded(found)


def use_experts_of(first: PagedModel, second: PagedModel) -> None:
    """Let each step of `second` use the experts that the same step of `first` has selected.

    Rounding decides between experts whose scores are close, and another expert changes a token's logits by a fifth.
    """
    selected: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def select_again(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        weights, ids = selected.popleft()
        assert (inputs[2].sort().values == ids.sort().values).float().mean() > 0.9
        return inputs[0], weights, ids, *inputs[3:]

    for layers, hook in ((first, lambda _, inputs: selected.append(inputs[1:3])), (second, select_again)):
        for layer in layers.model.modules():
            if isinstance(layer, FusedMoE):
                layer.register_forward_pre_hook(hook)


@pytest.mark.parametrize("name", some(FORMATS, *OF_EACH_LAYOUT))
def test_models_of_each_format_compute_the_same_bits(name: str, tmp_path: Path) -> None:
    runtime.start(2)
    shape = {"hidden_size": 256, "intermediate_size": 384}
    pair = q.write_pair(tmp_path, *FORMATS[name], **shape)
    coded = assert_same_logits(pair, is_reordered="activation order" in name)
    dense = len(coded) if "nvfp4" in name or "mxfp8" in name else 1
    assert coded.count(False) == dense, "all but the head are kept as they are stored, but NVFP4 and MXFP8"


@pytest.mark.parametrize(
    ("architecture", "name", "fields"),
    [
        ("Qwen3MoeForCausalLM", "gptq", {"moe_intermediate_size": 64}),
        ("Qwen3MoeForCausalLM", "compressed-tensors int8 channel", {}),
        ("Glm4MoeForCausalLM", "compressed-tensors fp8 channel", {}),
        ("MixtralForCausalLM", "awq", {"intermediate_size": 64}),
        ("MixtralForCausalLM", "quark mxfp4", {"intermediate_size": 128}),
    ],
)
def test_experts_of_each_format_compute_the_same_bits(
    architecture: str, name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    runtime.start(2)
    experts = (".w1", ".w2", ".w3", "gate_proj", "up_proj", "down_proj")
    pair = q.write_pair(
        tmp_path,
        *FORMATS[name],
        module=lambda module: module.endswith(experts),
        family=first_family(architecture),
        **fields,
    )
    assert any(assert_same_logits(pair))


def test_gpt_oss_as_published_computes_the_same_bits(tmp_path: Path) -> None:
    runtime.start(2)
    pair = q.write_gpt_oss_pair(tmp_path, first_family("GptOssForCausalLM"), intermediate_size=128, hidden_size=64)
    assert any(assert_same_logits(pair))


def test_deepseek_v4_as_published_computes_the_same_bits(tmp_path: Path) -> None:
    """Its output projection is a stack as experts are, but one tensor of the checkpoint."""
    runtime.start(2)
    assert any(assert_same_logits(deepseek_v4_as_published(tmp_path, o_lora_rank=32, head_dim=32, index_head_dim=32)))


@pytest.mark.parametrize(
    "name",
    some(["fp8 blocks", "awq", "gptq, activation order", "compressed-tensors int8 channel"], "fp8 blocks", "awq"),
)
def test_two_ranks_compute_the_same_bits(name: str, tmp_path: Path) -> None:
    """Their shares of inputs are whole groups, or the weight is made dense."""
    runtime.start(1)
    pair = q.write_pair(tmp_path, *FORMATS[name], hidden_size=256, intermediate_size=512)
    is_reordered = "activation order" in name

    def compute(path: Path, rank: Any) -> torch.Tensor:
        return PagedModel(path, dtype=torch.bfloat16, parallel=rank).step([(Row(prompt(20)), 20)])[0]

    found, expected = (at_once([partial(compute, path, each) for each in thread_ranks(2)[0]])[0] for path in pair)
    if is_reordered or not is_exact():
        assert (found - expected).norm() < 0.02 * expected.norm()
    else:
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("each_path")
def test_codes_of_experts_of_any_size_are_padded_to_whole_panels() -> None:
    experts, outputs, inputs = 3, 40, 96
    coded, packed = (kind(experts * 64, inputs) for kind in (CodedWeight, PackedWeight))
    meant = []
    for expert in range(experts):
        codes, dense = random_codes("int4", 32, torch.float16, outputs, inputs)
        coded.put_codes(expert * 64, codes)
        packed.put(expert * 64, dense)
        meant.append(dense)
    x, counts = torch.randn(60, inputs).bfloat16(), torch.tensor([50, 0, 4])
    found, expected = (ops.grouped_linear(x, each, None, counts, out_features=outputs) for each in (coded, packed))
    assert_same_products(found, expected, x, torch.cat(meant))
