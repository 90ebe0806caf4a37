"""Models with drafters over HTTP: streams in company, of which a core or a rank is killed, are those without drafts.

The drafting server has too few blocks for its streams, which share a prefix, and every row drafts in every step.
`tests/parity/test_drafter_pairs.py` has more targets, in one process.
"""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from models.ops.cpu.runtime import load_library
from tests.e2e.kaon_server import KaonServer, free_port
from tests.parity.checkpoints import make_checkpoint
from tests.parity.draft_heads import MTPPair, make_eagle
from tests.parity.paged_model import prompt
from tests.parity.test_draft_heads import SIZES
from tests.parity.variants import Variant, deepseek, moe, qwen3_5, qwen3_next

# Ten to twenty seconds each.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        load_library() is None, reason="only the operators give a token the same result in any company"
    ),
]

VOCAB_SIZE, LENGTH, PREFIX = 307, 128, 48
NUM_BLOCKS = 32
"""Fewer than the 12 blocks of each stream, of which they share three."""
FAULTY = "from engine.distributed import core_process; core_process.CORE_MODULE = 'faulty_ranks'; "


class Drafting(NamedTuple):
    """A checkpoint, and the settings of its drafter."""

    path: Path
    speculative: dict[str, Any]


def with_mtp(variant: Variant, directory: Path) -> Drafting:
    fields = {**variant.overrides, **SIZES.get(variant.architecture, {})}
    return Drafting(MTPPair(directory, variant._replace(overrides=fields)).path, {"speculative_method": "mtp"})


def with_eagle(version: int, directory: Path) -> Drafting:
    target = make_checkpoint(directory / "target", "qwen3", num_hidden_layers=6)
    parts = {"draft_vocab_size": 160} if version == 3 else {"has_own_head": True}
    head = make_eagle(directory / "head", target, version=version, max_position_embeddings=512, **parts)
    method = "eagle3" if version == 3 else "eagle"
    return Drafting(target, {"speculative_method": method, "speculative_model": str(head)})


def with_model(directory: Path) -> Drafting:
    target = make_checkpoint(directory / "target", "qwen3", num_hidden_layers=4)
    smaller = make_checkpoint(directory / "smaller", num_hidden_layers=1, seed=1)
    return Drafting(target, {"speculative_method": "draft", "speculative_model": str(smaller)})


def variant_of(variants: list[Variant], architecture: str) -> Variant:
    return next(each for each in variants if each.architecture == architecture)


PAIRS: dict[str, Callable[[Path], Drafting]] = {
    "DeepSeek-V3.2, MTP": partial(with_mtp, variant_of(deepseek.VARIANTS, "DeepseekV32ForCausalLM")),
    "GLM-4.5, MTP": partial(with_mtp, variant_of(moe.VARIANTS, "Glm4MoeForCausalLM")),
    "Qwen3-Next, MTP": partial(with_mtp, qwen3_next.VARIANTS[0]),
    "Qwen3.5, MTP": partial(with_mtp, variant_of(qwen3_5.VARIANTS, "Qwen3_5ForCausalLM")),
    "EAGLE": partial(with_eagle, 1),
    "EAGLE-3": partial(with_eagle, 3),
    "draft model": with_model,
}
RECURRENT = ("Qwen3-Next, MTP", "Qwen3.5, MTP")
"""Pairs without cached prefixes, since these do not have a sequence's state."""
FORMS = {"float32": ("float32", 1), "two ranks": ("float32", 2), "bfloat16": ("bfloat16", 1)}
"""Data types and numbers of ranks."""


def requests() -> list[dict[str, Any]]:
    """Greedy and seeded; random drafters' drafts are often accepted only where few tokens are allowed."""
    few = {"allowed_token_ids": [7, 19, 64]}
    how: list[dict[str, Any]] = [
        {"temperature": 0, **few},
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "seed": 4, **few},
        {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "seed": 5, "logit_bias": {"9": 2.0}},
    ]
    shared = prompt(PREFIX, vocab_size=VOCAB_SIZE)
    return [
        {
            "prompt": shared + prompt(3 + 2 * number, seed=number, vocab_size=VOCAB_SIZE),
            "max_tokens": LENGTH,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            **each,
        }
        for number, each in enumerate(how)
    ]


def answer(
    server: KaonServer, body: dict[str, Any], has_begun: threading.Event | None = None
) -> tuple[str, list[int]]:
    """The text and the tokens of a stream."""
    text, token_ids, reason = "", list[int](), None
    body = {"model": "target", **body}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["text"]
                token_ids += choice.get("token_ids") or []
                reason = choice["finish_reason"] or reason
                if has_begun is not None and token_ids:
                    has_begun.set()
    assert (reason, len(token_ids)) == ("length", LENGTH)
    return text, token_ids


def serving(log: Path, path: Path, dtype: str, **settings: Any) -> AbstractContextManager[KaonServer]:
    server = KaonServer(
        log,
        free_port(),
        model=str(path),
        dtype=dtype,
        max_num_seqs=8,
        max_model_len=512,
        server_config={"served_model_name": ["target"]},
        **settings,
    )
    return server.serving()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pair", PAIRS)
def test_streams_of_a_killed_core_or_rank_are_those_without_drafts(pair: str, form: str, tmp_path: Path) -> None:
    path, speculative = PAIRS[pair](tmp_path)
    dtype, num_ranks = FORMS[form]
    with serving(tmp_path / "plain.log", path, dtype) as plain, ThreadPoolExecutor(8) as threads:
        expected = list(threads.map(partial(answer, plain), requests()))
    faulty = {
        "before": FAULTY,
        "environment": {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "FAULTY_RANK": "0:drafts",
        },
    }
    drafting = {
        "speculative_config": {"num_speculative_tokens": 3, **speculative},
        "parallel_config": {"tensor_parallel_size": num_ranks},
        "num_kvcache_blocks": NUM_BLOCKS,
    }
    with serving(tmp_path / "log", path, dtype, **drafting, **faulty) as server, ThreadPoolExecutor(8) as threads:
        begun = [threading.Event() for _ in expected]
        found = [threads.submit(answer, server, *each) for each in zip(requests(), begun, strict=True)]
        for each, stream in zip(begun, found, strict=True):
            while not each.wait(0.05):
                assert not stream.done(), stream.exception()
        core = server.core
        (core.children()[-1] if num_ranks > 1 else core).kill()
        assert [each.result() for each in found] == expected
        assert server.metric("kaon_core_restarts_total") == 1
        assert server.metric("kaon_requests_resumed_total") > 0
        assert server.metric("kaon_preemptions_total") > 0
        assert (server.metric("kaon_prefix_cache_hit_tokens_total") > 0) is (pair not in RECURRENT)
        drafted, accepted = (server.metric(f"kaon_{name}draft_tokens_total") for name in ("", "accepted_"))
        assert 0 < accepted < drafted
