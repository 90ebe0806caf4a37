"""`/openapi.json` describes the server: its examples work, and real answers match it."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest

from engine.config.config import Config
from server.app import create_app
from server.limits.keys import ApiKeys
from tests.e2e.kaon_server import MODEL, KaonServer

GENERATES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
POOLS = {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
"""Endpoints that the shared server's model does not have: `test_http_embeddings` has servers of models that do."""
COUNTS = {"/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize"}
READS = sorted({*GENERATES, *POOLS, *COUNTS, "/v1/responses/compact", "/detokenize"})
GETS = ["/", "/v1/models", "/v1/models/{model}", "/version", "/livez", "/readyz", "/health", "/ping", "/metrics"]
BATCHES = {
    "/v1/files",
    "/v1/files/{file_id}",
    "/v1/files/{file_id}/content",
    "/v1/batches",
    "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
    "/v1/messages/batches",
    "/v1/messages/batches/{batch_id}",
    "/v1/messages/batches/{batch_id}/cancel",
    "/v1/messages/batches/{batch_id}/results",
}
"""Endpoints that `test_http_batches` covers."""
GETS += ["/kaon/limits", "/kaon/owners"]
ADMIN = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/is_sleeping", "/kaon/reload"}
ADMIN |= {"/update_weights"}
"""Endpoints that `test_http_adapters`, `test_http_sleep`, `test_http_weights` and `test_reload` cover."""
STORED = {
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/responses/{response_id}/input_items",
}


@pytest.fixture
def http(server: KaonServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="module")
def document(server: KaonServer) -> dict[str, Any]:
    return dict(server.get("/openapi.json").json())


def validate(instance: Any, schema: dict[str, Any]) -> None:
    """Check an instance, and not each time the schema, which `test_it_knows_every_route_and_resolves` does."""
    jsonschema.Draft202012Validator(schema).validate(instance)


def check(document: dict[str, Any], operation: dict[str, Any], answer: httpx.Response) -> None:
    """Compare `answer` with the status, content type and body that `operation` describes."""
    responses = operation["responses"]
    status = str(answer.status_code)
    described = responses.get(status) or responses[f"{status[0]}XX"]
    media_type = answer.headers["content-type"].partition(";")[0]
    schema = described["content"][media_type]["schema"]
    if media_type == "application/json":
        validate(answer.json(), {**schema, "components": document["components"]})


def example(document: dict[str, Any], operation: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of an operation's body, which refers to other schemas, and an example of it."""
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    return {**schema, "components": document["components"]}, dict(schema["examples"][0])


def test_it_knows_every_route_and_resolves(http: httpx.Client, document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {*READS, *GETS, *STORED, *BATCHES, *ADMIN}
    schemas = document["components"]["schemas"]
    for reference in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert reference in schemas
    assert "422" not in json.dumps(document["paths"])
    assert "HTTPValidationError" not in schemas
    assert schemas["ChatCompletionRequest"]["required"] == ["model", "messages"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_the_page_for_people_shows_all_of_it_and_loads_nothing(http: httpx.Client, document: dict[str, Any]) -> None:
    page = http.get("/docs").text
    assert all(f"<code>{path}</code>" in page for path in document["paths"])
    assert "repetition_penalty" in page
    assert not re.search(r"<script|<img|<link|src=|@import|https?://", page)


@pytest.mark.parametrize("path", READS)
def test_each_example_is_valid_and_its_answer_is_as_described(
    http: httpx.Client, document: dict[str, Any], path: str
) -> None:
    operation = document["paths"][path]["post"]
    schema, body = example(document, operation)
    validate(body, schema)
    whole = http.post(path, json=body)
    assert whole.status_code == (404 if path in POOLS else 200)
    check(document, operation, whole)
    if path in GENERATES:
        streamed = http.post(path, json={**body, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        check(document, operation, streamed)


@pytest.mark.parametrize("path", READS)
def test_null_in_an_optional_field_is_valid_and_counts_as_absent(
    http: httpx.Client, document: dict[str, Any], path: str
) -> None:
    schema, body = example(document, document["paths"][path]["post"])
    optional = {name: None for name in schema["properties"] if name not in schema.get("required", ())}
    body = {**optional, **body}
    validate(body, schema)
    assert http.post(path, json=body).status_code == (404 if path in POOLS else 200)


@pytest.mark.parametrize("path", READS)
def test_a_field_of_a_wrong_type_is_invalid_and_refused_as_described(
    http: httpx.Client, document: dict[str, Any], path: str
) -> None:
    operation = document["paths"][path]["post"]
    schema, body = example(document, operation)
    mistyped: dict[str, Any] = {name: {"a": 1} for name in schema.get("required", ("prompt",))}
    for wrong in ({"model": 7}, {"no_such_field": 1}, mistyped):
        with pytest.raises(jsonschema.ValidationError):
            validate({**body, **wrong}, schema)
        answer = http.post(path, json={**body, **wrong})
        assert answer.status_code == 400
        check(document, operation, answer)
    for content_type, status in (("text/plain", 415), ("application/json", 400)):
        answer = http.post(path, content=b"{", headers={"Content-Type": content_type})
        assert answer.status_code == status
        check(document, operation, answer)


@pytest.mark.parametrize("path", GETS)
def test_what_is_read_is_as_described(http: httpx.Client, document: dict[str, Any], path: str) -> None:
    operation = document["paths"][path]["get"]
    answer = http.get(path.replace("{model}", MODEL))
    assert answer.status_code == 200
    check(document, operation, answer)
    if "{model}" in path:
        check(document, operation, http.get("/v1/models/none"))


def test_a_kept_response_is_as_described_all_its_life(http: httpx.Client, document: dict[str, Any]) -> None:
    _, body = example(document, document["paths"]["/v1/responses"]["post"])
    id = http.post("/v1/responses", json=body).json()["id"]
    for path, method, status in (
        ("/v1/responses/{response_id}", "GET", 200),
        ("/v1/responses/{response_id}/input_items", "GET", 200),
        ("/v1/responses/{response_id}/cancel", "POST", 400),
        ("/v1/responses/{response_id}", "DELETE", 200),
        ("/v1/responses/{response_id}", "GET", 404),
    ):
        answer = http.request(method, path.replace("{response_id}", id))
        assert answer.status_code == status
        check(document, document["paths"][path][method.lower()], answer)


def test_keys_are_described_where_there_are_some() -> None:
    document = create_app(Config(), SimpleNamespace(ready=None), keys=ApiKeys(["sk-one"])).openapi()  # type: ignore[arg-type]
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert document["paths"]["/livez"]["get"]["security"] == []
    assert "security" not in document["paths"]["/metrics"]["get"]
