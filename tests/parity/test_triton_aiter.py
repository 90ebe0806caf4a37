"""Whole models whose operators ROCm's library `aiter` computes, by its stand-in, against plain torch; bfloat16."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.attention.aiter import AiterAttentionBackend
from models.attention.backend import BACKENDS, AttentionBackend, AttentionBatch, _gpu_backend
from models.attention.torch_paged import TorchAttentionBackend
from models.attention.triton import TritonAttentionBackend
from models.layers.moe import FusedMoE
from models.ops import aiter, flash_attention
from models.ops import paged_attention as reference
from models.ops import registry as backends
from models.ops import triton as kernels
from models.ops.aiter import library as bindings
from models.ops.aiter.cases import Sizes
from models.ops.aiter.probe import wrong
from models.ops.stored_weight import stored_of
from models.ops.triton.grids import AttentionPlan
from models.ops.types import AttentionInputs, AttentionOptions, KVCacheTensor
from tests.aiter_library import Library, library
from tests.parity import quantized_checkpoints as q
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import CPU, PagedModel, Row, prompt
from tests.parity.test_quantization import FORMATS
from tests.parity.triton_interpreter import requires_interpreter
from tests.parity.variants import all_variants, gemma3, gpt_oss

__all__ = ["library"]

pytestmark = requires_interpreter

SPANS, DECODES, PROMPTS = "unified_attention", "paged_attention_v1", "flash_attn_varlen_func"
DENSE = frozenset({"attention", "norm", "activation", "moe", "linear", "gemm"})


@dataclass
class Calls:
    """The called functions of the library, in order."""

    names: list[str] = field(default_factory=list)

    def start(self, operators: frozenset[str], *, decodes_apart: bool = False) -> None:
        """Start the library, and record its calls."""
        aiter.start(operators, decodes_apart=decodes_apart)
        for name in list(bindings._bound):
            bindings._bound[name] = self._heard(name, bindings._bound[name])

    def _heard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            self.names.append(name)
            return function(*args, **keywords)

        return call


@pytest.fixture
def calls(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The library is available and correct. Weights are laid out as on a GPU; torch stores, since Triton's kernel is
    slow here."""
    monkeypatch.setattr("models.loading.loader.can_pack", lambda _dtype: False)
    monkeypatch.setattr("models.attention.triton.store", reference.store)
    yield Calls()
    aiter.stop()


def checkpoint(name: str, path: Path) -> Path:
    """Norms of heads; windows and a soft cap; sinks and experts with biases; experts."""
    match name:
        case "gemma3":
            variant = gemma3.VARIANTS[0]
        case "gpt_oss":
            variant = gpt_oss.VARIANTS[0]
        case "experts":
            variant = next(one for one in all_variants() if one.architecture == "Qwen3MoeForCausalLM")
            return make_checkpoint(path, variant.family, moe_intermediate_size=32)
        case _:
            return make_checkpoint(path, "qwen3")
    return make_checkpoint(path, variant.family, **variant.overrides)


def run(model: PagedModel) -> list[torch.Tensor]:
    """Two prompts, one of them in chunks, and then decodes next to a third prompt. # each [n, V]"""
    rows = [Row(prompt(length, seed=length)) for length in (20, 33, 5)]
    return [
        *model.step([(rows[0], 18), (rows[1], 25)]),
        *model.step([(rows[0], 1), (rows[1], 7)], num_decodes=1),
        *model.step([(rows[0], 1), (rows[1], 1), (rows[2], 5)], num_decodes=2),
    ]


def run_briefly(model: PagedModel) -> list[torch.Tensor]:
    """A short prompt, where kernels are interpreted."""
    return [model.logits(prompt(6))]


def by_torch(path: Path, run: Callable[[PagedModel], list[torch.Tensor]] = run) -> list[torch.Tensor]:
    """The same without kernels or libraries."""
    aiter.stop()
    kernels.stop()
    return run(PagedModel(path, dtype=torch.bfloat16, backend=TorchAttentionBackend(CPU)))


def products_by_kernels() -> None:
    """Weights stay quantised only where kernels compute with them; torch computes the rest."""
    assert kernels.start(CPU) is None
    kernels.leave_to_torch(frozenset(backends.OPERATORS) - {"linear"})


def paged(path: Path, backend: AttentionBackend | None = None) -> PagedModel:
    """Zeros in the cache, as the engine allocates it: the library reads values after a row's last token."""
    model = PagedModel(path, dtype=torch.bfloat16, backend=backend or AiterAttentionBackend(CPU))
    for layer in model.cache.values():
        assert isinstance(layer, KVCacheTensor)
        layer.k_cache.zero_()
        layer.v_cache.zero_()
    return model


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], error: float = 0.03) -> None:
    """As much difference as sums of bfloat16 in two orders have."""
    one, other = torch.cat(found).float(), torch.cat(expected).float()
    assert (one - other).norm() <= error * other.norm()


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss", "experts"])
def test_a_model_by_the_library_is_the_model_by_torch(name: str, tmp_path: Path, calls: Calls) -> None:
    path = checkpoint(name, tmp_path / "model")
    calls.start(DENSE)
    model = paged(path)
    found = run(model)
    assert calls.names.count(SPANS) == 3 * len(model.cache), "of each step and layer"
    assert "tgemm.mm" in calls.names
    assert ("fused_moe" in calls.names) == (name == "experts")
    assert_near(found, by_torch(path))


def test_decodes_are_computed_apart_where_that_is_asked_for(tmp_path: Path, calls: Calls) -> None:
    path = checkpoint("qwen3", tmp_path / "model")
    expected = by_torch(path)
    calls.start(frozenset({"attention", "decode"}), decodes_apart=True)
    assert_near(run(paged(path)), expected)
    assert (calls.names.count(SPANS), calls.names.count(DECODES)) == (3 * 2, 2 * 2)
    calls.names.clear()
    calls.start(frozenset({"attention"}), decodes_apart=True)
    assert_near(run(paged(path)), expected)
    assert calls.names == [SPANS] * 6
    calls.names.clear()
    calls.start(frozenset({"decode"}), decodes_apart=True)
    assert_near(run(paged(path)), expected)
    assert calls.names == [DECODES] * 4


@pytest.mark.parametrize("attends", [True, False])
def test_long_prompts_are_the_librarys_by_another_function(
    attends: bool, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys are gathered; a chunk after a long prefix and decodes are computed as without it."""
    path = checkpoint("qwen3", tmp_path / "model")
    expected = by_torch(path)
    monkeypatch.setattr(flash_attention, "LEAST_QUERIES", 5)
    monkeypatch.setattr(flash_attention, "form_of", lambda *_: "any")
    monkeypatch.setattr("models.attention.triton.attend_decodes", attend_by_torch)
    monkeypatch.setattr("models.attention.triton.paged_attention", attend_by_torch)
    flash_attention.start(frozenset({"any"}))
    try:
        calls.start(frozenset({"attention", "prefill"} if attends else {"prefill"}))
        found = run(paged(path))
    finally:
        flash_attention.start(frozenset())
    assert_near(found, expected)
    attended = [name for name in calls.names if name in (SPANS, PROMPTS)]
    by_layer = [[PROMPTS], [SPANS], [PROMPTS, SPANS]] if attends else [[PROMPTS], [], [PROMPTS]]
    assert attended == [name for step in by_layer for name in step * 2]  # Two layers.


def attend_by_torch(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KVCacheTensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> None:
    """For all rows of a step, or for its decodes."""
    rows = int((plan.query_starts <= len(q)).sum()) - 1
    starts, lengths, tables = plan.query_starts[: rows + 1], plan.seq_lens[:rows], plan.block_tables[:rows]
    out.copy_(reference.attend(q, cache, starts, lengths, tables, options, sinks))


@pytest.mark.parametrize("query_len", [1, 2])
def test_a_replay_reads_its_step_from_the_buffers_that_were_captured(query_len: int, calls: Calls) -> None:
    calls.start(frozenset({"attention"}))
    backend = AiterAttentionBackend(CPU)
    backend.init_capture(max_batch_size=8, max_blocks=40, query_len=query_len)
    captured = backend.prepare_for_capture(3, query_len)
    assert captured is not None
    parts = torch.randn(3 * query_len, 8, 16).bfloat16().split([4, 2, 2], 1)
    cache, inputs = KVCacheTensor(*torch.randn(2, 120, 2, 16, 16).bfloat16()), AttentionInputs(AttentionOptions(0.25))
    lengths = torch.tensor([5, 300, 17])
    tables = torch.arange(120, dtype=torch.int32).view(3, 40)
    places = (lengths[:, None] - torch.arange(query_len, 0, -1)).flatten()
    slots = tables[torch.arange(3).repeat_interleave(query_len), places // 16] * 16 + places % 16
    step = backend.build_metadata(
        AttentionBatch(
            query_lens=np.full(3, query_len),
            seq_lens=lengths.numpy(),
            block_tables=tables[:, :20].numpy(),
            slot_mapping=slots.numpy().astype("int64"),
            num_decodes=3,
            query_len=query_len,
        )
    )
    backend.prepare_for_replay(step, 3)
    replayed = backend.forward(*parts, cache, captured, inputs)
    assert torch.equal(replayed, backend.forward(*parts, cache, step, inputs))
    assert calls.names == [SPANS] * 2


def test_other_kernels_compute_what_a_release_has_no_arguments_for(
    tmp_path: Path, library: Library, calls: Calls
) -> None:
    library.replace(
        "ops/triton/attention/unified_attention.py",
        ("    sinks: torch.Tensor | None = None,\n", ""),
        (", sinks", ""),
    )
    path = checkpoint("gpt_oss", tmp_path / "model")
    calls.start(frozenset({"attention"}))
    found = run_briefly(paged(path))
    assert not calls.names
    assert_near(found, by_torch(path, run_briefly))


def test_products_of_fp8_in_blocks_are_the_librarys(tmp_path: Path, calls: Calls) -> None:
    products_by_kernels()
    quantize, config = FORMATS["fp8 blocks"]
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}
    path = q.write_pair(tmp_path / "model", quantize, config, **shape).quantised
    calls.start(frozenset({"linear"}))
    model = paged(path)
    assert any(stored_of(weight) is not None for weight in model.model.parameters())
    found = run_briefly(model)
    # Two layers of o, gate and up, down. A block of qkv has keys and values with two scales.
    assert calls.names.count("gemm_a8w8_blockscale") == 2 * 3
    assert_near(found, by_torch(path, run_briefly), 0.1)


def test_products_whose_scales_are_of_other_blocks_are_tritons(tmp_path: Path, calls: Calls) -> None:
    products_by_kernels()
    quantize, config = FORMATS["fp8 a scale a tensor"]
    path = q.write_pair(tmp_path / "model", quantize, config).quantised
    calls.start(frozenset({"linear"}))
    found = run_briefly(paged(path))
    assert not calls.names
    assert_near(found, by_torch(path, run_briefly), 0.1)


def test_experts_that_the_library_has_no_kernels_for_stay_as_they_are(
    tmp_path: Path, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint("gpt_oss", tmp_path / "model")
    calls.start(frozenset({"moe"}))
    model = paged(path)
    assert all(module.shuffled is None for module in model.model.modules() if isinstance(module, FusedMoE))
    assert "2 of 2 layers of experts are not computed by aiter, but by Triton" in caplog.text
    assert_near(run_briefly(model), by_torch(path, run_briefly))


def test_experts_in_fp8_of_blocks_are_shuffled_with_their_scales(calls: Calls) -> None:
    calls.start(frozenset({"moe"}))
    by_blocks, by_torch = (FusedMoE(256, 128, 4) for _ in range(2))
    assert not by_torch.shuffle(), "it is in float32"
    for name in ("w13", "w2"):
        weight = getattr(by_torch, name)
        codes = (torch.randn(weight.shape) / 8).to(torch.float8_e4m3fn)
        rows, columns = weight.shape[1] // 128, weight.shape[2] // 128
        blocks = torch.rand(4, rows, columns) + 0.5
        weight.data = codes.float() * blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)
        # As a stack of weights that stays quantised, of a model in bfloat16.
        getattr(by_blocks, name).data = torch.full((1,), torch.nan).bfloat16().expand(weight.shape)
        getattr(by_blocks, name).stored = SimpleNamespace(fp8_blocks=lambda pair=(codes, blocks): pair)
    assert by_blocks.shuffle()
    hidden, routed = torch.randn(7, 256), torch.rand(7, 2)
    ids = torch.randn(7, 4).topk(2).indices
    expected = by_torch(hidden, routed, ids)
    found = by_blocks(hidden.bfloat16(), routed, ids)
    assert calls.names[-1] == "fused_moe"
    assert_near([found], [expected])


def test_serving_goes_on_by_triton_where_the_library_is_broken(
    tmp_path: Path, library: Library, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.replace("__init__.py", ("    return F.rms_norm(input", "    return 2 * F.rms_norm(input"))
    library.replace("ops/triton/attention/unified_attention.py", ("    assert causal", "    raise OSError('no GPU')"))

    def reasons(device: torch.device, operators: list[str], sizes: Sizes) -> dict[str, str | None]:
        return {operator: wrong(operator, sizes, device) for operator in operators}

    monkeypatch.setattr(backends, "aiter_reasons", reasons)
    sizes = Sizes(hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, experts=4, expert_inner=32)
    chosen = {choice.operator: str(choice) for choice in backends.start(CPU, ["norm=aiter", "attention=aiter"], sizes)}
    assert chosen["norm"].startswith("norm by triton (not aiter: its numbers are off by ")
    assert chosen["attention"] == "attention by triton (not aiter: it failed: OSError: no GPU)"
    assert chosen["activation"] == "activation by aiter"
    backend = BACKENDS[_gpu_backend(CPU)](CPU)
    assert type(backend) is TritonAttentionBackend
    path = checkpoint("qwen3", tmp_path / "model")
    found = run_briefly(paged(path, backend))
    assert_near(found, by_torch(path, run_briefly))


def test_a_release_that_multiplies_what_lies_before_a_window_does_not_compute_models_with_windows(
    library: Library,
) -> None:
    sizes = Sizes(hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16)
    assert wrong("attention", sizes, CPU) is None
    reason = wrong("attention", sizes._replace(has_windows=True), CPU)
    assert reason == "its numbers are not the right ones: attention with a window"


def test_a_library_that_fails_after_its_probe_prevents_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "aiter_reasons", lambda *_: {"norm": None, "moe": None})
    chosen = {choice.operator: str(choice) for choice in backends.start(CPU, ["norm=aiter"])}
    reason = "it failed after its probe: ModuleNotFoundError: No module named 'aiter'"
    assert chosen["norm"] == f"norm by triton (not aiter: {reason})"
    assert chosen["moe"] == "moe by triton"
    assert not aiter.takes("norm")
