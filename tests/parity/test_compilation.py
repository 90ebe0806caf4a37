"""`compilation_level` 3: the operations between calls of attention are compiled, and compute the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from models.layers import compilation
from models.layers.compilation import compile_layers
from models.layers.parameter import onednn_of
from tests.parity.ahead import answers, waiting
from tests.parity.capturing_backend import CapturingBackend
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Row, prompt
from tests.parity.runners import rebuilt
from tests.parity.test_deferred_output import sequences
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import NUM_BLOCKS, checkpoint, prompts, runner_for
from tests.parity.tolerance import assert_within, with_bound

__all__ = ["checkpoint", "prompts"]

LEVEL_3 = {"compilation_level": 3}


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> None:
    torch._dynamo.reset()


class Pieces:
    """A compiler that changes nothing and counts its calls."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.sizes.append(sum(node.op.startswith("call") for node in module.graph.nodes))
        return module.forward


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Pieces:
    made = Pieces()
    monkeypatch.setattr(compilation, "DEFAULT_BACKEND", made)
    return made


def logits(model: PagedModel) -> torch.Tensor:
    """Logits of two sequences: a prompt in chunks next to another's, decodes of two rows and of one. # [tokens, V]"""
    long, short = Row(prompt(35), slot=2), Row(prompt(20, seed=1), slot=5)
    parts = model.step([(long, 25)])
    parts += model.step([(long, 1), (short, 17)], num_decodes=1)
    parts += model.step([(long, 1), (short, 1)], num_decodes=2)
    parts += model.step([(long, 1)], num_decodes=1)
    return torch.cat(parts)


def assert_same_as_uncompiled(model: PagedModel, path: Path) -> None:
    """Up to rounding: compiled code may use other addresses, and add in another order."""
    uncompiled = PagedModel(path)
    expected, bound = with_bound(uncompiled.model, lambda: logits(uncompiled).log_softmax(-1))
    assert_within(logits(model).log_softmax(-1), expected, bound)


def test_layers_of_a_kind_share_what_is_compiled_for_any_number_of_tokens(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, num_hidden_layers=4)
    pieces, model = Pieces(), PagedModel(path)
    assert compile_layers(model.model, pieces) == 4
    assert_same_as_uncompiled(model, path)
    # The norm before the first layer's attention and before the others', the projections before and after attention,
    # and norm and feed-forward; for one token and for several. Attention is in none: that would be dozens.
    assert len(pieces.sizes) == 2 * 5
    assert max(pieces.sizes) < 20
    logits(model)
    assert len(pieces.sizes) == 2 * 5


def test_steps_of_the_start_compile_all_and_graphs_replay_it(
    checkpoint: Path, prompts: list[list[int]], pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1)
    expected = answers(waiting(runner_for(checkpoint), sequences(prompts[:8])))
    assert pieces.sizes == []
    runner = runner_for(checkpoint, compilation_config={**LEVEL_3, "cudagraph_capture_sizes": (1, 8)})
    device = GraphDevice()
    runner = rebuilt(runner, device, NUM_BLOCKS)
    runner.warm_up()
    compiled = len(pieces.sizes)
    assert compiled > 0
    assert answers(waiting(runner, sequences(prompts[:8]))) == expected
    assert len(pieces.sizes) == compiled, "a step of a request compiles"
    assert device.num_replayed > 0


def test_a_compiler_that_fails_ends_the_start_in_a_sentence(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise RuntimeError("no working C++ compiler was found\nand more of it")

    monkeypatch.setattr(compilation, "DEFAULT_BACKEND", broken)
    runner = runner_for(checkpoint, compilation_config=LEVEL_3)
    with pytest.raises(ValueError, match=r"compilation_level is 3, but .*no working C\+\+ compiler.*; set it to 0"):
        runner.warm_up()


def test_models_that_are_not_cut_at_their_attention_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"compilation_level is 3, but Qwen3ForCausalLM runs by transformers' own"):
        runner_for(checkpoint, model_impl="transformers", compilation_config=LEVEL_3)


def test_weights_of_compiled_layers_are_not_packed_for_onednn(checkpoint: Path) -> None:
    runner = runner_for(checkpoint, torch.bfloat16, cpu_operators=False, compilation_config=LEVEL_3)
    assert [onednn_of(each) for each in runner.model.parameters() if onednn_of(each) is not None] == []


@pytest.mark.slow
def test_what_inductor_makes_computes_the_same(tmp_path: Path) -> None:
    """Needs a C++ compiler; a minute of one core."""
    path = make_checkpoint(tmp_path)
    model = PagedModel(path)
    compile_layers(model.model, "inductor")
    assert_same_as_uncompiled(model, path)
