"""Streamed text: stop strings at every division, and characters of several bytes."""

import asyncio
from typing import Any

import openai
import pytest

from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from tests.e2e.kaon_server import MODEL, KaonServer

TOKENS = 16
REQUEST: dict[str, Any] = {"model": MODEL, "prompt": "Tell me of", "max_tokens": TOKENS, "temperature": 0}
LONG: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
CHARACTERS = 10
"""Number of positions of a greedy output at which it is divided."""


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str | None]:
    answer = await client.completions.create(**{**REQUEST, **LONG, **fields})
    return answer.choices[0].text, answer.choices[0].finish_reason


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[list[str], str | None]:
    stream = await client.completions.create(**{**REQUEST, **LONG, **fields}, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    return [choice.text for choice in choices], choices[-1].finish_reason


async def test_every_piece_of_an_output_stops_it_where_the_piece_begins(server: KaonServer) -> None:
    async with server.async_client() as client:
        text, _ = await whole(client)
        stops = {text[i:j] for i in range(CHARACTERS) for j in range(i + 1, CHARACTERS + 1) if text[i:j]}
        at_once = asyncio.Semaphore(32)

        async def check(stop: str) -> None:
            async with at_once:
                cut = text[: text.index(stop)]
                assert await whole(client, stop=stop) == (cut, "stop")
                pieces, reason = await streamed(client, stop=[stop, "never to be found"])
                assert ("".join(pieces), reason) == (cut, "stop")

        await asyncio.gather(*map(check, stops))


async def test_a_stop_string_stays_in_the_text_where_asked(server: KaonServer) -> None:
    async with server.async_client() as client:
        text, _ = await whole(client)
        stop = text[3:6]
        kept = text[: text.index(stop) + len(stop)]
        extra = {"ignore_eos": True, "include_stop_str_in_output": True}
        assert await whole(client, stop=stop, extra_body=extra) == (kept, "stop")


@pytest.mark.parametrize("character", ["é", "漢", pytest.param("😀", marks=pytest.mark.slow)])
async def test_characters_of_several_tokens_are_never_split(server: KaonServer, character: str) -> None:
    """The model may write only the character's bytes, all equally often, in random order."""
    tokenizer = Tokenizer.from_checkpoint(CHECKPOINT_DIR)
    single_bytes = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
    bias = {str(single_bytes[bytes([byte])]): 100 for byte in character.encode()}
    length = len(character.encode())
    # 32 of each byte: with more, the penalty would outweigh the bias.
    fields: dict[str, Any] = {"logit_bias": bias, "frequency_penalty": 2, "temperature": 2, "max_tokens": 32 * length}
    async with server.async_client() as client:

        async def write(seed: int) -> str:
            text, _ = await whole(client, **fields, seed=seed)
            pieces, _ = await streamed(client, **fields, seed=seed)
            assert "".join(pieces) == text
            assert len([piece for piece in pieces if "\ufffd" in piece]) <= text.count("\ufffd")
            return text

        written = await asyncio.gather(*map(write, range(3 * length)))
    assert character in "".join(written)
