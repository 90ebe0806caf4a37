"""Models whose weights are rounded to 8 or 4 bits when they are read: close to the model, and independent of the
batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.config import Config, PrecisionConfig
from engine.core.startup import PhaseClock, start_model
from models.architectures.config import ModelConfig
from models.demo import CHECKPOINT_DIR
from models.errors import CheckpointError
from models.layers.parameter import packed_of
from models.loading.loader import load_model
from models.lora.adapters import load_adapters
from models.ops.cpu import runtime
from models.ops.cpu import runtime as library
from models.ops.cpu.packed_weight import QuantizedWeight
from models.quantization.config import Rounding
from tests.parity import quantized_checkpoints as q
from tests.parity.adapters import make_adapter, read_weights
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import CPU, PagedModel, Row, prompt
from tests.parity.test_architectures import generate
from tests.parity.test_cpu_models import _SIZES, runner
from tests.parity.variants import PARTLY_TORCH, all_variants

needs_operators = pytest.mark.skipif(
    library.load_library() is None, reason="the operators were not built: install again where there is a C compiler"
)
ARCHITECTURES = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV4ForCausalLM",
]


@pytest.fixture(params=["int8", "int4"])
def rounding(request: pytest.FixtureRequest) -> Rounding:
    return request.param  # type: ignore[no-any-return]


def checkpoint_of(architecture: str, directory: Path) -> Path:
    variant = next(each for each in all_variants() if each.architecture == architecture)
    fields = {**variant.overrides, **_SIZES[architecture]}
    return make_checkpoint(directory, variant.family, dtype=torch.bfloat16, **fields)


def asked(rounding: str) -> PrecisionConfig:
    return PrecisionConfig.model_validate({"quantization": rounding})


@needs_operators
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_the_same_alone_and_in_company(architecture: str, rounding: Rounding, tmp_path: Path) -> None:
    """In batches: chunks of prompts next to decodes, prefixes found in the cache, one preemption of all."""
    path = checkpoint_of(architecture, tmp_path)
    shared = prompt(40, seed=5)
    prompts = [prompt(37), shared + prompt(21, seed=6), shared + prompt(3, seed=7), prompt(70, seed=8)]
    fields: dict[str, Any] = {"quantization_config": asked(rounding)}
    together = runner(path, scheduling_policy="mixed", max_num_batched_tokens=48, **fields)
    assert (together.program is not None) == (architecture not in PARTLY_TORCH)
    found = generate(together, prompts)
    alone = runner(path, enable_prefix_caching=False, **fields)
    assert found == [generate(alone, [tokens], preempted_at=None)[0] for tokens in prompts]


@needs_operators
@pytest.mark.parametrize(("asked_for", "most"), [("int8", 0.02), ("int4", 0.2), ("mxfp4", 0.25)])
def test_scores_are_near_those_of_the_model(asked_for: Rounding, most: float) -> None:
    """Errors of the embedded model on texts of its training distribution, relative to their spread."""
    runtime.start(2)
    config = ModelConfig.from_checkpoint(CHECKPOINT_DIR)
    ids = torch.arange(40, 1400)
    scores = []
    for rounded in (None, asked_for):
        model: Any = load_model(
            CHECKPOINT_DIR, config, dtype=torch.bfloat16, device=CPU, progress=False, rounding=rounded
        )
        with torch.inference_mode():
            scores.append(model.compute_logits(model.model.layers[0].mlp(model.model.embed_tokens(ids))))
    assert (scores[1] - scores[0]).norm() <= most * scores[0].norm()


@needs_operators
def test_each_weight_has_the_bits_that_it_needs(tmp_path: Path) -> None:
    runtime.start(2)
    path = checkpoint_of("Qwen3MoeForCausalLM", tmp_path)
    config = ModelConfig.from_checkpoint(path)
    model: Any = load_model(path, config, dtype=torch.bfloat16, device=CPU, progress=False, rounding="int4")
    layer = model.model.layers[0]
    bits = {}
    for name, module in (("head", model.lm_head), ("qkv", layer.self_attn.qkv_proj), ("router", layer.mlp.gate)):
        packed = packed_of(module.weight)
        bits[name] = packed.options[0] if isinstance(packed, QuantizedWeight) else 16
    assert bits == {"head": 8, "qkv": 4, "router": 16}
    assert isinstance(packed_of(layer.mlp.experts.w13), QuantizedWeight)


@needs_operators
def test_memory_is_asked_for_as_much_as_rounded_weights_take(tmp_path: Path) -> None:
    runtime.start(2)
    path = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=512, dtype=torch.bfloat16)
    config = ModelConfig.from_checkpoint(path)
    room: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU, "progress": False, "available_bytes": 1_500_000}
    load_model(path, config, rounding="int8", **room)
    with pytest.raises(CheckpointError, match="does not fit the memory"):
        load_model(path, config, **room)


@needs_operators
def test_an_adapter_adds_to_rounded_weights_what_it_adds_to_others(tmp_path: Path) -> None:
    runtime.start(2)
    path = checkpoint_of("Qwen3ForCausalLM", tmp_path / "base")
    make_adapter(tmp_path / "adapter", read_weights(path), rank=8, alpha=16, seed=1)
    found = []
    roundings: tuple[Rounding | None, ...] = (None, "int8")
    for rounded in roundings:
        model = PagedModel(path, dtype=torch.bfloat16, rounding=rounded)
        load_adapters(model.model, {"mine": tmp_path / "adapter"}, dtype=torch.bfloat16, device=CPU)
        rows = [Row(prompt(60, seed=3), slot=adapter, adapter=adapter) for adapter in (0, 1)]
        found.append([model.step([(row, 60)])[0].log_softmax(-1) for row in rows])
    (_, expected), (without, adapted) = found
    assert (adapted - expected).abs().mean() < 0.2 * (adapted - without).abs().mean()


@needs_operators
def test_a_quantised_checkpoint_is_rounded_again(tmp_path: Path, rounding: Rounding) -> None:
    pair = q.write_pair(tmp_path, q.awq, q.AWQ_CONFIG)
    config = Config(model=str(pair.quantised), dtype="bfloat16", quantization_config=asked(rounding), max_model_len=64)
    model: Any = start_model(config, PhaseClock(0.0)).runner.model
    assert isinstance(packed_of(model.model.layers[0].mlp.down_proj.weight), QuantizedWeight)


def refusal(**fields: Any) -> str:
    with pytest.raises(ValueError, match="quantization is int8, which rounds weights") as error:
        start_model(Config(quantization_config=asked("int8"), max_model_len=64, **fields), PhaseClock(0.0))
    return str(error.value)


def test_other_types_are_refused() -> None:
    assert refusal(dtype="float32").endswith("but dtype is float32; set it to bfloat16")


def test_transformers_own_models_are_refused() -> None:
    assert "Qwen3ForCausalLM runs by transformers' own code" in refusal(model_impl="transformers")


def test_an_installation_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load_library", lambda: None)
    assert refusal().endswith("but Kaon was installed without a C compiler; install one, then Kaon again")
