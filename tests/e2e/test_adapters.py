"""Adapters over HTTP: each answers like its merged weights, in any batch and after any prompt."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.client.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from tests.e2e.kaon_server import KaonServer, free_port
from tests.parity.adapters import make_adapter, merge, read_weights
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import Reference, prompt

MODELS = ("base", "wide", "narrow")
NUM_TOKENS = 12
PROMPTS = [prompt(40, seed=1), prompt(40, seed=1)[:32] + prompt(9, seed=2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[list[int]]]:
    """Greedy tokens after each prompt, by model: transformers', of the base and of each merged adapter."""
    checkpoint = make_checkpoint(directory / "base")
    base = read_weights(checkpoint)
    paths = [checkpoint]
    for name, rank in (("wide", 8), ("narrow", 2)):
        deltas = make_adapter(directory / name, base, rank=rank, alpha=rank, seed=rank)
        paths.append(merge(directory / f"merged-{name}", checkpoint, base, deltas))
    references = zip(MODELS, map(Reference, paths), strict=True)
    return {name: [model.greedy(tokens, NUM_TOKENS) for tokens in PROMPTS] for name, model in references}


@pytest.fixture(scope="module")
def served(directory: Path, expected: dict[str, list[list[int]]]) -> Iterator[KaonServer]:
    assert len({str(tokens) for tokens in expected.values()}) == len(MODELS)
    running = KaonServer(
        directory / "log",
        free_port(),
        model=str(directory / "base"),
        lora=[f"wide={directory / 'wide'}", f"narrow={directory / 'narrow'}"],
        scheduling_policy="mixed",
        max_num_batched_tokens=64,
        server_config={"served_model_name": ["base"]},
    ).ready()
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


async def test_adapters_share_batches_and_never_each_others_cache(
    served: KaonServer, expected: dict[str, list[list[int]]]
) -> None:
    async with served.async_client() as client:

        async def completion(model: str, tokens: list[int], **extra: Any) -> tuple[list[int], int]:
            body = {"ignore_eos": True, "return_token_ids": True, **extra}
            answer = await client.completions.create(
                model=model, prompt=tokens, temperature=0, max_tokens=NUM_TOKENS, extra_body=body
            )
            assert answer.model == model
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            cached = 0 if details is None else details.cached_tokens or 0
            return answer.choices[0].token_ids, cached  # type: ignore[attr-defined]

        for number, tokens in enumerate(PROMPTS):
            found = await asyncio.gather(*(completion(model, tokens) for model in MODELS))
            assert [ids for ids, _ in found] == [expected[model][number] for model in MODELS]
            # The second prompt begins like the first: each model finds only its own blocks.
            assert [cached for _, cached in found] == [32 * number] * len(MODELS)
        assert await completion("wide", PROMPTS[0], cache_salt="mine") == (expected["wide"][0], 0)
        assert await completion("wide", PROMPTS[0], cache_salt="mine") == (expected["wide"][0], 32)
        assert (await completion("narrow", PROMPTS[0], cache_salt="mine"))[1] == 0


def test_chats_and_responses_choose_an_adapter_too(served: KaonServer) -> None:
    with served.client() as client:
        chats, responses = [], []
        for model in MODELS:
            chat = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "fox"}], temperature=0, max_tokens=NUM_TOKENS
            )
            chats.append((chat.model, chat.choices[0].message.content))
            response = client.responses.create(model=model, input="fox", temperature=0, max_output_tokens=NUM_TOKENS)
            responses.append((response.model, response.output_text))
    assert responses == chats
    assert len({text for _, text in chats}) == len(MODELS)


@pytest.mark.slow  # By the server: the tests above.
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_offline_engine_takes_adapters_by_name(
    ranks: int, directory: Path, expected: dict[str, list[list[int]]]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    adapters = tuple(f"{name}={directory / name}" for name in MODELS[1:])
    with LLMEngine(
        str(directory / "base"), lora=adapters, dtype="float32", num_kvcache_blocks=64, tensor_parallel_size=ranks
    ) as engine:
        requests = {name: engine.add_request(PROMPTS, params, lora=name) for name in MODELS[1:]}
        found = {name: [result["token_ids"] for result in engine.collect(ids)] for name, ids in requests.items()}
        found["base"] = [result["token_ids"] for result in engine.generate(PROMPTS, params, use_tqdm=False)]
        assert found == expected
        with pytest.raises(ValueError, match="lora is 'tall', but the engine's adapters are: wide, narrow"):
            engine.generate(PROMPTS, lora="tall")


def test_models_are_listed_and_others_are_not_found(served: KaonServer) -> None:
    with served.client() as client:
        parents = {model.id: model.parent for model in client.models.list()}  # type: ignore[attr-defined]
        assert parents == {"base": None, "wide": "base", "narrow": "base"}
        with pytest.raises(openai.NotFoundError, match="use base or wide or narrow"):
            client.completions.create(model="tall", prompt="x")


@pytest.mark.slow  # The error message: tests/unit/models/test_lora_config.py.
def test_an_adapter_that_cannot_be_served_ends_the_server_with_a_sentence(start_server: Any, tmp_path: Path) -> None:
    running = start_server(lora=[f"mine={tmp_path / 'absent'}"])
    assert running.wait() == 1
    assert f"LoRA adapter mine cannot be served: {tmp_path / 'absent'} is not a directory" in running.stderr
