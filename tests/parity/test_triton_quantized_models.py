"""Models whose weights stay quantised for the kernels, beside dense ones of the very weights that they mean."""

from pathlib import Path

import pytest
import torch

from models.kernels import triton
from models.layers.quantized_product import stored_experts_of, stored_of
from models.loader import load_model
from models.model_config import read_checkpoint_config
from models.parallel import ExpertParallel, TensorParallel
from tests.parity import quantized_checkpoints as q
from tests.parity.paged_model import PagedModel, prompt
from tests.parity.test_expert_parallel import Exchanges
from tests.parity.test_quantization import FORMATS
from tests.parity.triton_interpreter import DEVICE, requires_interpreter, triton_kernels  # noqa: F401, a fixture
from tests.parity.variants import all_variants

pytestmark = [requires_interpreter, pytest.mark.usefixtures("triton_kernels")]
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 2}
STAYING = (
    "fp8 a scale a tensor",
    "fp8 blocks",
    "fbgemm",
    "compressed-tensors int4 groups",
    "compressed-tensors int4 groups, zero points",
    "quark mxfp4",
    "awq",
    "gptq, zero points",
    "gptq, one group",
)
"""Of `FORMATS`, one of each layout that there is a kernel for."""


def run(path: Path) -> tuple[torch.Tensor, int]:
    """Logits, and how many weights stayed quantised."""
    model = PagedModel(path)
    triton.leave_to_torch(frozenset({"norm", "activation"}))
    stored = [parameter for parameter in model.model.parameters() if stored_of(parameter) is not None]
    found = model.logits(prompt(5))
    triton.leave_to_torch(frozenset())
    return found, len(stored)


def assert_near(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Activations are rounded to FP8 where weights are."""
    assert (found - expected).norm() <= (0.1 if "fp8" in name or name == "fbgemm" else 1e-4) * expected.norm()


@pytest.mark.parametrize("name", STAYING)
def test_weights_stay_as_they_are_stored(name: str, tmp_path: Path) -> None:
    quantize, config = FORMATS[name]
    pair = q.write_pair(tmp_path, quantize, config, **SHAPE)
    (found, stored), (expected, dense) = run(pair.quantised), run(pair.dense)
    assert dense == 0
    assert stored == 2 * 4  # Two layers of qkv, o, gate and up, down.
    assert_near(found, expected, name)


def test_weights_become_dense_where_one_part_of_them_is(tmp_path: Path) -> None:
    quantize, config = FORMATS["fp8 blocks"]
    pair = q.write_pair(tmp_path, quantize, config, module=lambda name: name.endswith(("q_proj", "v_proj")), **SHAPE)
    (found, stored), (expected, _) = run(pair.quantised), run(pair.dense)
    assert stored == 0
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_weights_become_dense_where_torch_is_to_compute_them(tmp_path: Path) -> None:
    triton.leave_to_torch(frozenset({"linear"}))
    quantize, config = FORMATS["awq"]
    model = PagedModel(q.write_pair(tmp_path, quantize, config, **SHAPE).quantised)
    assert all(stored_of(parameter) is None for parameter in model.model.parameters())


def test_experts_of_gpt_oss_stay_as_they_are_stored(tmp_path: Path) -> None:
    family = next(variant.family for variant in all_variants() if variant.architecture == "GptOssForCausalLM")
    pair = q.write_gpt_oss_pair(tmp_path, family, hidden_size=64, intermediate_size=64)
    model = PagedModel(pair.quantised)
    weights = [name for name, weight in model.model.named_parameters() if stored_experts_of(weight) is not None]
    assert {name.rpartition(".")[2] for name in weights} == {"w13", "w2"}
    (found, _), (expected, _) = run(pair.quantised), run(pair.dense)
    assert_near(found, expected, "gpt-oss")


def test_experts_that_replicas_share_out_become_dense_for_torch_asks_them(tmp_path: Path) -> None:
    family = next(variant.family for variant in all_variants() if variant.architecture == "GptOssForCausalLM")
    path = q.write_gpt_oss_pair(tmp_path, family, hidden_size=64, intermediate_size=64).quantised
    parallel = TensorParallel(experts=ExpertParallel(1, 2, Exchanges(2).of(1)))
    config = read_checkpoint_config(path, "auto")
    model = load_model(path, config, dtype=torch.float32, device=DEVICE, progress=False, parallel=parallel)
    stacks = [weight for name, weight in model.named_parameters() if name.rpartition(".")[2] in ("w13", "w2")]
    assert stacks
    assert all(stored_experts_of(weight) is None and weight.isfinite().all() for weight in stacks)
