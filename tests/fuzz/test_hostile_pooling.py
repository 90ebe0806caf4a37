"""Any request to the endpoints that pool gets an answer or a 4xx, and another client's stream does not change."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from server.schemas.body import RequestModel
from server.schemas.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from tests.e2e.kaon_server import KaonServer, free_port
from tests.parity.embedding_checkpoints import encoder, qwen3_embedding

RIGHT: dict[str, tuple[type[RequestModel], dict[str, Any]]] = {
    "/v1/embeddings": (EmbeddingRequest, {"input": ["a dog", "x"]}),
    "/pooling": (PoolingRequest, {"input": "a dog"}),
    "/classify": (ClassifyRequest, {"input": "a dog"}),
    "/score": (ScoreRequest, {"text_1": "a dog", "text_2": ["x", "y"]}),
    "/v1/rerank": (RerankRequest, {"query": "a dog", "documents": ["x", {"text": "y"}]}),
    "/v2/rerank": (RerankRequest, {"query": "a dog", "documents": ["x", {"text": "y"}]}),
}
NEIGHBOUR = {
    "model": "m",
    "prompt": "The fox",
    "max_tokens": 150,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([-1, 0, 1, 2**31, 2**63])
)
TEXTS = st.text(max_size=40) | st.sampled_from(["", "\x00", "<|im_start|>", "🙂" * 50, "x" * 5000, "\ud83d\ude00"])
VALUES = st.recursive(
    LEAVES | TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3)
)
INPUTS = TEXTS | st.lists(TEXTS, max_size=4) | st.lists(st.integers(-2, 400), max_size=600) | VALUES
INPUT_FIELDS = ("input", "query", "documents", "text_1", "text_2")


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """Requests that may be correct, with some of their fields set to anything; and arbitrary bodies."""
    model, right = RIGHT[path]
    inputs = {name: INPUTS | st.lists(INPUTS, max_size=4) for name in INPUT_FIELDS if name in model.model_fields}
    names = st.sampled_from(sorted(model.model_fields)) | st.text()
    anything = st.dictionaries(names, VALUES, max_size=3)
    whole = st.builds(
        lambda first, second: {"model": "m", **right, **first, **second},
        st.fixed_dictionaries({}, optional=inputs),
        anything,
    )
    text = (whole | VALUES).map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass"))
    return text | st.binary(max_size=60)


def start(directory: Any, checkpoint: Any, **options: Any) -> Iterator[KaonServer]:
    running = KaonServer(
        directory / "log",
        free_port(),
        model=str(checkpoint),
        num_kvcache_blocks=512,
        server_config={"served_model_name": ("m",)},
        **options,
    ).ready()
    core = running.core.pid
    yield running
    assert running.core.pid == core, "a request ended the engine"
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    directory = tmp_path_factory.mktemp("embedder")
    yield from start(directory, qwen3_embedding(directory / "model"), task=("generate", "embed"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    directory = tmp_path_factory.mktemp("scorer")
    yield from start(directory, encoder(directory / "model", "bert", num_labels=1))


def send(server: KaonServer, path: str, count: int) -> dict[int, int]:
    """Send `count` requests. Returns the number of answers by status."""
    seen: dict[int, int] = {}
    with server.http() as http:

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(bodies(path))
        def each(body: bytes) -> None:
            answer = http.post(path, content=body, headers={"content-type": "application/json"})
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            decoded = answer.json()
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (body, answer.text)
            assert answer.status_code == 200 or decoded["error"]["message"], (body, answer.text)

        each()
    return seen


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", RIGHT)
def test_whatever_is_sent_is_answered_or_refused(
    scorer: KaonServer, embedder: KaonServer, path: str, count: int, record_property: Any
) -> None:
    server = embedder if path in ("/v1/embeddings", "/pooling") else scorer
    seen = send(server, path, count)
    record_property("measured", str(seen))
    assert {200, 400} <= seen.keys(), seen


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
async def test_a_neighbours_stream_is_as_alone(embedder: KaonServer, path: str) -> None:
    async with httpx.AsyncClient(base_url=embedder.url, timeout=120) as http:
        alone = await neighbour(http)
        load = asyncio.create_task(asyncio.to_thread(send, embedder, path, 20))
        streams = 0
        while not load.done() or not streams:
            assert await neighbour(http) == alone
            streams += 1
        await load


async def neighbour(http: httpx.AsyncClient) -> str:
    """The text of another client's stream."""
    text = ""
    async with http.stream("POST", "/v1/completions", json=NEIGHBOUR) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text
