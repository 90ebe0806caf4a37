"""The report of `kaon verify` for engines whose answers depend on other work, and for correct ones."""

from types import SimpleNamespace
from typing import Any, Self

import pytest

from engine.client.verify import COMPANY, Proof, verify
from engine.config.config import Config
from engine.sampling_params import SamplingParams

BLOCKS_OF_FEW = 1000


class FakeEngine:
    """Answers by a function of the prompt and the seed, unless it is in the state in which its answers are wrong."""

    num_started = 0

    def __init__(self, config: Config, wrong: str = "", *, shares_prefixes: bool = True) -> None:
        self.config, self.wrong = config, wrong
        self.number, FakeEngine.num_started = FakeEngine.num_started, FakeEngine.num_started + 1
        self.stats = SimpleNamespace(prefix_hit_tokens=0, preemptions=0)
        self.seen: set[tuple[int, ...]] = set()
        self.model_info = SimpleNamespace(
            vocab_size=64,
            max_model_len=4096,
            shares_prefixes=shares_prefixes,
            architecture="Fake",
            dtype="bfloat16",
            attention_backend="none",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs."""

    def generate(self, prompts: list[list[int]], params: list[SamplingParams], use_tqdm: bool) -> list[dict[str, Any]]:
        is_little = (self.config.num_kvcache_blocks or BLOCKS_OF_FEW) < BLOCKS_OF_FEW
        if is_little and len(prompts) > 1:
            self.stats.preemptions += 3
        states = {
            "prefix hits": not is_little and tuple(prompts[0]) in self.seen and len(prompts) == 1,
            "in company": len(prompts) > COMPANY,
            "restarted": self.number == 1,
            "chunked": is_little and len(prompts) == 1,
            "preempted": is_little and len(prompts) > 1,
        }
        self.stats.prefix_hit_tokens += 16 * (tuple(prompts[0]) in self.seen)
        self.seen |= set(map(tuple, prompts))
        shift = int(states.get(self.wrong, False))
        return [
            {"token_ids": [sum(prompt) % 50, (each.seed or 0) % 50 + shift], "finish_reason": "length", "error": None}
            for prompt, each in zip(prompts, params, strict=True)
        ]


def proofs(wrong: str = "", **how: Any) -> dict[str, Proof]:
    FakeEngine.num_started = 0
    made = verify(Config(device="cpu"), lambda config: FakeEngine(config, wrong, **how))  # type: ignore[arg-type,return-value]
    return {proof.name: proof for proof in made}


def test_an_engine_whose_answers_depend_on_nothing_passes_and_says_how_it_was_shown() -> None:
    found = proofs()
    assert list(found) == ["alone", "prefix hits", "in company", "restarted", "chunked", "preempted"]
    assert all(proof.is_right and not proof.skipped for proof in found.values())
    assert FakeEngine.num_started == 3
    assert str(found["preempted"]) == "preempted     8 answers equal (3 preemptions)"


@pytest.mark.parametrize("wrong", ["prefix hits", "in company", "restarted", "chunked", "preempted"])
def test_what_changes_answers_is_named(wrong: str) -> None:
    found = proofs(wrong)
    assert [name for name, proof in found.items() if not proof.is_right] == [wrong]
    assert "DIFFERENT: the answer to 3 tokens, greedy from token 1 on" in str(found[wrong])


def test_a_model_that_shares_no_prefixes_is_said_not_to_be_shown() -> None:
    proof = proofs(shares_prefixes=False)["prefix hits"]
    assert str(proof) == "prefix hits   not proven: this model shares no prefixes"
