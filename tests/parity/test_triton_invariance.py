"""With `batch_invariant`, `kaon verify` shows that answers by the kernels do not depend on other work."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest
import torch

from engine.client import verify
from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from models.attention.triton import TritonAttentionBackend
from models.layers import linear
from models.ops import triton
from models.ops.triton.dense_products import dense_linear
from tests.parity.checkpoints import make_checkpoint
from tests.parity.quantized_checkpoints import write_pair
from tests.parity.runners import CPU, load
from tests.parity.test_quantization import FORMATS
from tests.parity.test_triton_quantized_models import write_experts
from tests.parity.test_worker_model_runner import generate
from tests.parity.triton_interpreter import DEVICE, requires_interpreter, triton_kernels
from tests.parity.variants import all_variants

__all__ = ["triton_kernels"]


@pytest.fixture
def invariant(triton_kernels: torch.device) -> torch.device:
    triton.keep_invariant()
    return triton_kernels


class Engine:
    """A scheduler and a runner in this process, with the part of an engine that `verify` uses."""

    def __init__(self, path: Path, config: Config) -> None:
        loaded = load(path, config, torch.bfloat16, backend=TritonAttentionBackend(CPU))
        assert config.num_kvcache_blocks is not None
        self.runner = ModelRunner(loaded, config.num_kvcache_blocks)
        self.scheduler = Scheduler(self.runner.config)
        self.model_info = SimpleNamespace(
            architecture=loaded.model_config.architecture,
            dtype="bfloat16",
            attention_backend=loaded.backend.name,
            vocab_size=loaded.model_config.vocab_size,
            max_model_len=loaded.max_model_len,
            shares_prefixes=True,
        )
        assert loaded.is_invariant, loaded.why_varying

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @property
    def stats(self) -> Any:
        return self.scheduler.stats("decode", 0.0)

    def generate(
        self, prompts: list[list[int]], params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[dict[str, Any]]:
        del use_tqdm
        answers = generate(self.runner, self.scheduler, prompts, list(params))
        return [{"token_ids": answer, "finish_reason": "length"} for answer in answers]


MIXTURE = next(each for each in all_variants() if each.architecture == "Qwen3MoeForCausalLM")
TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""As few tiles as a model can have: tests of single products cover the splitting of sums."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@requires_interpreter
@pytest.mark.usefixtures("invariant")
@pytest.mark.timeout(900)
@pytest.mark.slow  # Sums of products: the next test; `kaon verify`: tests/e2e/test_cli_verify.py.
@pytest.mark.parametrize("form", ["dense", "awq", "fp8 blocks", "experts", "experts in fp8"])
def test_the_proofs_of_verify_hold(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "COMPANY", 4)
    monkeypatch.setattr(verify, "_PREEMPTING", 6)
    monkeypatch.setattr(verify, "_TOKENS", 4)
    monkeypatch.setattr(verify, "_LENGTHS", (3, 40))
    if form == "dense":
        path = make_checkpoint(tmp_path, "qwen3", **TINY)
    elif form == "experts":
        path = make_checkpoint(tmp_path, MIXTURE.family, **MIXTURE.overrides | TINY | EXPERTS)
    elif form == "experts in fp8":
        own = TINY | EXPERTS
        path = write_experts(tmp_path, MIXTURE.architecture, "fp8 blocks", **own).quantised
    else:
        path = write_pair(tmp_path, *FORMATS[form], **TINY).quantised
    config = Config(max_model_len=128, num_kvcache_blocks=64, cpu_operators=False, batch_invariant=True)
    proofs = list(verify.verify(config, lambda each: Engine(path, each)))
    assert [proof.name for proof in proofs] == [
        "alone", "prefix hits", "in company", "restarted", "chunked", "preempted",
    ]  # fmt: skip
    for proof in proofs:
        assert proof.is_right, proof
        assert not proof.skipped, proof


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [96, 1088])
def test_a_rows_dense_product_is_the_same_in_any_company(inputs: int, dtype: torch.dtype) -> None:
    """Sums of one program, split sums that another kernel adds, and split sums that one program adds."""
    generator = torch.Generator().manual_seed(inputs)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in ((100, inputs), (40, inputs), (40,))
    )
    whole = linear.linear(x, torch.nn.Parameter(weight), bias)
    for rows in (1, 16, 40, 64):
        assert torch.equal(dense_linear(x[:rows], weight, bias), whole[:rows])
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), expected, rtol=2e-2, atol=2e-1 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"batch_invariant": True}, "torch's libraries choose the order of sums by the batch"),
        ({"batch_invariant": False}, None),
    ],
)
def test_a_start_that_cannot_be_invariant_says_why(fields: dict[str, bool], why: str | None, tmp_path: Path) -> None:
    loaded = load(make_checkpoint(tmp_path, "qwen3"), Config(num_kvcache_blocks=8, **fields))
    assert not loaded.is_invariant
    if why is None:
        loaded.require_invariance()
        return
    with pytest.raises(
        ValueError, match=f"^batch_invariant is set, but {why}; unset batch_invariant, or change that$"
    ):
        loaded.require_invariance()
