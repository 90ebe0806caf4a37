"""Embeddings, scores and classes over HTTP: real servers of small random models, and common clients."""

import base64
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import pytest

from tests.e2e.kaon_server import KaonServer, free_port
from tests.e2e.test_http_openapi import check, example
from tests.parity.embedding_checkpoints import qwen3_classifier, qwen3_embedding, qwen3_reranker

TEXTS = ["The quick brown fox", "a lazy dog sleeps; the fox and the dog are friends.", "jumps"]
SETTINGS = {"num_kvcache_blocks": 512, "server_config": {"served_model_name": ("model",)}}


def serve(directory: Path, checkpoint: Path, **settings: object) -> KaonServer:
    return KaonServer(directory / "log", free_port(), model=str(checkpoint), **{**SETTINGS, **settings}).ready()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    """A model that both embeds and generates."""
    directory = tmp_path_factory.mktemp("embedder")
    server = serve(directory, qwen3_embedding(directory / "model"), task=("generate", "embed"))
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.stderr


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    directory = tmp_path_factory.mktemp("reranker")
    server = serve(directory, qwen3_reranker(directory / "model"))
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.stderr


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def error(answer: httpx.Response) -> dict[str, str]:
    return dict(answer.json()["error"])


def test_openais_client_gets_the_same_vectors_in_both_encodings(embedder: KaonServer) -> None:
    with embedder.client() as client:
        # The client requests base64 by default, and decodes it.
        decoded = client.embeddings.create(model="model", input=TEXTS)
        plain = client.embeddings.create(model="model", input=TEXTS, encoding_format="float")
    assert [each.embedding for each in decoded.data] == [each.embedding for each in plain.data]
    assert [each.index for each in plain.data] == [0, 1, 2]
    assert decoded.usage.prompt_tokens == decoded.usage.total_tokens > len(TEXTS)
    for each in plain.data:
        assert math.hypot(*each.embedding) == pytest.approx(1, abs=1e-6)


def test_every_form_of_the_input_gives_the_same_vector(embedder: KaonServer) -> None:
    ids = embedder.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]

    def embed(given: object) -> list[list[float]]:
        body = {"model": "model", "input": given}
        return [each["embedding"] for each in embedder.post("/v1/embeddings", body).json()["data"]]

    (vector,) = embed(TEXTS[0])
    for same in (embed([TEXTS[0]]), embed(ids), embed([ids]), embed([TEXTS[1], TEXTS[0]])[1:]):
        assert same == [pytest.approx(vector, abs=1e-6)]


def test_dimensions_cut_and_normalise_again(embedder: KaonServer) -> None:
    body = {"model": "model", "input": TEXTS[0]}
    (whole,) = embedder.post("/v1/embeddings", body).json()["data"]
    (cut,) = embedder.post("/v1/embeddings", {**body, "dimensions": 8}).json()["data"]
    first = whole["embedding"][:8]
    assert cut["embedding"] == pytest.approx([each / math.hypot(*first) for each in first], abs=1e-6)
    refused = embedder.post("/v1/embeddings", {**body, "dimensions": 65})
    assert refused.status_code == 400
    assert error(refused)["param"] == "dimensions"
    assert "dimensions is 65; this model's embeddings have 64" in error(refused)["message"]


def test_a_prompt_of_the_checkpoint_goes_before_the_text(embedder: KaonServer) -> None:
    def embed(**fields: object) -> list[float]:
        vector: list[float] = embedder.post("/v1/embeddings", {"model": "model", **fields}).json()["data"][0][
            "embedding"
        ]
        return vector

    written_out = embed(input="Find what answers: a dog")
    assert embed(input="a dog", prompt_name="query") == pytest.approx(written_out, abs=1e-6)
    refused = embedder.post("/v1/embeddings", {"model": "model", "input": "x", "prompt_name": "none"})
    assert error(refused)["message"] == "prompt_name is 'none'; the prompts of this model are: query, document"


def test_an_input_that_is_too_long_is_named_and_may_be_cut(embedder: KaonServer) -> None:
    body = {"model": "model", "input": ["short", [5] * 600]}
    refused = embedder.post("/v1/embeddings", body)
    assert refused.status_code == 400
    assert error(refused)["code"] == "context_length_exceeded"
    assert error(refused)["param"] == "input[1]"
    assert "input[1] is not accepted: its prompt has 600 tokens" in error(refused)["message"]
    assert "512" in error(refused)["message"]
    cut = embedder.post("/v1/embeddings", {**body, "truncate_prompt_tokens": 7}).json()
    same = embedder.post("/v1/embeddings", {**body, "input": ["short", [5] * 7]}).json()
    assert cut["data"][1]["embedding"] == pytest.approx(same["data"][1]["embedding"], abs=1e-6)
    assert embedder.post("/v1/embeddings", {**body, "truncate_prompt_tokens": -1}).status_code == 200


def test_many_texts_run_in_few_steps(embedder: KaonServer) -> None:
    before = sum(
        embedder.metric(f'kaon_step_duration_seconds_count{{kind="{kind}"}}') for kind in ("prefill", "mixed")
    )
    texts = [f"{index} {text}" for index, text in enumerate(TEXTS * 22)][:64]
    data = embedder.post("/v1/embeddings", {"model": "model", "input": texts}).json()["data"]
    after = sum(embedder.metric(f'kaon_step_duration_seconds_count{{kind="{kind}"}}') for kind in ("prefill", "mixed"))
    assert len(data) == 64
    assert after - before <= 8  # One, unless the steps of a busy machine end at their time's bound.


def test_a_search_by_embeddings_uses_the_checkpoints_prompts(embedder: KaonServer) -> None:
    body = {"model": "model", "query": "a dog", "documents": TEXTS}
    results = embedder.post("/rerank", body).json()["results"]
    inputs = ["Find what answers: a dog", *TEXTS]
    data = embedder.post("/v1/embeddings", {"model": "model", "input": inputs}).json()["data"]
    query, *documents = [each["embedding"] for each in data]
    expected = sorted(((cosine(query, each), index) for index, each in enumerate(documents)), reverse=True)
    assert [each["index"] for each in results] == [index for _, index in expected]
    assert [each["relevance_score"] for each in results] == pytest.approx([score for score, _ in expected], abs=1e-5)
    assert [each["document"]["text"] for each in results] == [TEXTS[index] for _, index in expected]


def test_a_model_may_generate_too_and_its_streams_do_not_depend_on_embeddings(embedder: KaonServer) -> None:
    body = {"model": "model", "prompt": "The fox", "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    def lines(answer: httpx.Response) -> str:
        return "".join(
            json.loads(line[6:])["choices"][0]["text"] for line in answer.iter_lines() if line.startswith("data: {")
        )

    with embedder.http() as http:
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as alone:
            expected = lines(alone)
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            for _ in range(4):
                assert embedder.post("/v1/embeddings", {"model": "model", "input": TEXTS * 8}).status_code == 200
            assert lines(stream) == expected


def test_jinas_and_coheres_forms_of_a_rerank(reranker: KaonServer) -> None:
    body = {"model": "model", "query": "a dog", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    jina = reranker.post("/rerank", body).json()
    assert [set(each) for each in jina["results"]] == [{"index", "relevance_score", "document"}] * 3
    scores = [each["relevance_score"] for each in jina["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert jina["usage"]["total_tokens"] == jina["usage"]["prompt_tokens"]
    cohere = reranker.post("/v2/rerank", {**body, "top_n": 2}).json()
    assert cohere["results"] == [
        {"index": each["index"], "relevance_score": each["relevance_score"]} for each in jina["results"][:2]
    ]
    assert cohere["meta"]["api_version"]["version"] == "2"
    scored = reranker.post("/score", {"model": "model", "text_1": "a dog", "text_2": TEXTS}).json()["data"]
    by_index = {each["index"]: each["relevance_score"] for each in jina["results"]}
    assert [each["score"] for each in scored] == [by_index[index] for index in range(3)]


def test_scores_pair_texts_one_to_one_or_one_to_many(reranker: KaonServer) -> None:
    def scores(first: object, second: object) -> list[float]:
        answer = reranker.post("/v1/score", {"model": "model", "text_1": first, "text_2": second})
        return [each["score"] for each in answer.json()["data"]]

    pairs = scores(["a dog", "a fox"], ["x", "y"])
    assert pairs == pytest.approx([*scores("a dog", "x"), *scores("a fox", ["y"])], abs=1e-6)
    refused = reranker.post("/score", {"model": "model", "text_1": ["x", "y"], "text_2": ["x", "y", "z"]})
    assert error(refused)["message"] == "text_1 holds 2 texts and text_2 3; it must hold 1, or as many"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/rerank", {"query": "x" * 3000, "documents": ["y"] * 2048}, "query"),
        ("/score", {"text_1": ["x" * 3000], "text_2": ["y"] * 2048}, "text_1"),
        ("/score", {"text_1": ["x"] * 2048, "text_2": ["y"] * 2048, "instruction": "z" * 3000}, "instruction"),
    ],
)
def test_what_a_reranker_reads_with_each_document_has_the_bound_of_a_body(
    reranker: KaonServer, path: str, body: dict[str, object], field: str
) -> None:
    """Otherwise a request of some kilobytes could stand for gigabytes of tokens."""
    refused = reranker.post(path, {"model": "model", **body})
    assert refused.status_code == 400
    assert error(refused)["param"] == field
    assert error(refused)["message"].startswith(f"{field} has 3000 characters, which are read 2048 times, with each")


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"]
)
def test_the_examples_of_the_description_work(embedder: KaonServer, path: str) -> None:
    document = embedder.get("/openapi.json").json()
    operation = document["paths"][path]["post"]
    schema, body = example(document, operation)
    jsonschema.validate(body, schema)
    answer = embedder.post(path, body)
    assert answer.status_code == 200
    check(document, operation, answer)


def test_many_long_vectors_are_one_answer(embedder: KaonServer) -> None:
    texts = [f"{index}" for index in range(600)]
    body = {"model": "model", "input": texts}
    plain = embedder.post("/v1/embeddings", body).json()["data"]
    encoded = embedder.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()["data"]
    assert [each["index"] for each in plain] == list(range(600))
    assert len(plain) == len(encoded)
    for each, other in zip(plain, encoded, strict=True):
        assert struct.unpack("<64f", base64.b64decode(other["embedding"])) == pytest.approx(
            each["embedding"], abs=1e-6
        )


def test_a_document_may_be_cut_and_a_long_one_is_named(reranker: KaonServer) -> None:
    body = {"model": "model", "query": "a dog", "documents": ["x", "y" * 4000]}
    refused = reranker.post("/v1/rerank", body)
    assert refused.status_code == 400
    assert error(refused)["param"] == "documents[1]"
    assert reranker.post("/v1/rerank", {**body, "max_tokens_per_doc": 20}).status_code == 200
    assert reranker.post("/v1/rerank", {**body, "truncate_prompt_tokens": -1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_a_reranker_answers_other_endpoints_with_a_404_in_words(
    reranker: KaonServer, path: str, body: dict[str, object]
) -> None:
    answer = reranker.post(path, {"model": "model", **body})
    assert answer.status_code == 404
    assert error(answer)["code"] == "model_not_supported"
    assert "/rerank" in error(answer)["message"]


@pytest.mark.slow  # Endpoint and model: tests/fuzz/test_hostile_pooling.py, tests/parity/test_pooling.py.
def test_a_classifier_names_the_most_probable_class(tmp_path: Path) -> None:
    server = serve(tmp_path, qwen3_classifier(tmp_path / "model", num_labels=3))
    try:
        answer = server.post("/classify", {"model": "model", "input": TEXTS}).json()
        logits = server.post("/pooling", {"model": "model", "input": TEXTS, "use_activation": False}).json()
        for each, raw in zip(answer["data"], logits["data"], strict=True):
            assert sum(each["probs"]) == pytest.approx(1, abs=1e-6)
            assert each["num_classes"] == 3
            best = max(range(3), key=raw["data"].__getitem__)
            assert each["label"] == f"LABEL_{best}"
        refused = server.post("/score", {"model": "model", "text_1": "x", "text_2": "y"})
        assert error(refused)["message"] == ("the model has 3 classes, and no single score; classify texts instead")
    finally:
        assert server.stop() == 0
