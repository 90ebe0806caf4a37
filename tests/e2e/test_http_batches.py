"""Files and batches over HTTP, by OpenAI's client, and `kaon run-batch`: each line is answered once, after any
death."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types import Batch

from tests.e2e.kaon_server import KaonServer, eventually

CHAT = "/v1/chat/completions"


def chat(number: int, **fields: Any) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is {number} + {number}?"}
    body = {"model": "kaon-demo", "messages": [question], "temperature": 0, "max_tokens": 24, **fields}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def start(client: openai.OpenAI, lines: Iterable[dict[str, Any]], **fields: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    assert (file.purpose, file.filename) == ("batch", "in.jsonl")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    final = ("completed", "failed", "cancelled", "expired")
    eventually(lambda: client.batches.retrieve(batch.id).status in final)
    return client.batches.retrieve(batch.id)


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_answers_as_the_endpoint_does(server: KaonServer) -> None:
    with server.client() as client:
        alone = [client.chat.completions.create(**chat(number)["body"]) for number in range(5)]
        lines = [*(chat(number) for number in range(5)), chat(5, temperature=9), chat(6, model="none")]
        batch = ended(client, start(client, lines, metadata={"job": "7"}))
        assert (batch.status, batch.metadata, batch.endpoint) == ("completed", {"job": "7"}, CHAT)
        assert batch.request_counts is not None
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (7, 5, 2)
        output, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
        assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(5)]
        texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in output]
        assert texts == [answer.choices[0].message.content for answer in alone]
        assert [line["response"]["status_code"] for line in errors] == [400, 404]
        assert "temperature is 9" in errors[0]["response"]["body"]["error"]["message"]
        for id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            assert client.files.delete(id or "").deleted
        assert batch.id in [each.id for each in client.batches.list(limit=5)]


@pytest.mark.parametrize(
    ("range", "status", "said"),
    [
        ("bytes=2-3", 206, "23"),
        ("bytes=10-", 416, "which is not within the file"),
        ("bytes=-0", 416, "which is not within the file"),
        ("lines=1-2", 400, "send bytes=FIRST-LAST, or leave it out"),
        ("bytes=3-1", 400, "send bytes=FIRST-LAST, or leave it out"),
        ("bytes", 400, "send bytes=FIRST-LAST, or leave it out"),
    ],
)
def test_a_bad_range_of_a_file_is_an_error_object(server: KaonServer, range: str, status: int, said: str) -> None:
    with server.client() as client:
        file = client.files.create(file=b"0123456789", purpose="batch")
        with server.http() as http:
            answer = http.get(f"/v1/files/{file.id}/content", headers={"Range": range})
        assert answer.status_code == status
        if status == 206:
            assert answer.text == said
        else:
            assert said in answer.json()["error"]["message"]
            assert answer.headers.get("content-range") == ("bytes */10" if status == 416 else None)
        client.files.delete(file.id)


def test_a_wrong_input_fails_with_its_lines(server: KaonServer) -> None:
    with server.client() as client:
        wrong = {**chat(2), "custom_id": "line-1"}
        batch = ended(client, start(client, [chat(1), wrong]))
        assert batch.status == "failed"
        assert batch.errors is not None
        [error] = batch.errors.data or []
        assert (error.code, error.line, error.param) == ("duplicate_custom_id", 2, "custom_id")


def test_a_cancelled_batch_keeps_what_is_done(server: KaonServer) -> None:
    with server.client() as client:
        endless = [chat(number, max_tokens=4000, ignore_eos=True) for number in range(200)]
        batch = start(client, endless)
        eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        eventually(lambda: server.metric("kaon_requests_live") > 0)
        client.batches.cancel(batch.id)
        batch = ended(client, batch)
        assert batch.status == "cancelled"
        assert batch.request_counts is not None
        assert batch.request_counts.total == 200
        written = [read(client, id) for id in (batch.output_file_id, batch.error_file_id) if id is not None]
        assert sorted(line["custom_id"] for lines in written for line in lines) == sorted(
            f"line-{number}" for number in range(200)
        )
        eventually(lambda: server.metric("kaon_requests_live") == 0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda client: client.files.create(file=b"x", purpose="fine-tune"), "purpose is 'fine-tune'"),
        (lambda client: client.files.retrieve("file-1"), "there is no file 'file-1'"),
        (lambda client: client.batches.retrieve("batch_1"), "there is no batch 'batch_1'"),
        (lambda client: client.batches.list(limit=1000).data, "limit is '1000'; it must be an integer between 1 and"),
        (
            lambda client: client.batches.create(
                input_file_id="file-1", endpoint="/v1/images", completion_window="24h"
            ),
            "endpoint is",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(
    server: KaonServer, call: Callable[[openai.OpenAI], object], sentence: str
) -> None:
    with server.client() as client, pytest.raises(openai.APIStatusError, match=sentence):
        call(client)


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"purpose": "batch", "expires_after": '{"anchor": "created_at"}'}, "expires_after", "expires_after[anchor]"),
        ({"purpose": "batch", "colour": "red"}, "colour", "colour is not a field of this form"),
        ({}, "purpose", "purpose is missing"),
    ],
)
def test_a_form_has_no_other_fields(server: KaonServer, fields: dict[str, str], param: str, sentence: str) -> None:
    with server.http() as http:
        answer = http.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert sentence in answer.json()["error"]["message"]


def test_an_unknown_file_names_the_field_that_holds_it(server: KaonServer) -> None:
    with server.client() as client:
        wrong = {"endpoint": "/v1/responses", "completion_window": "24h"}
        with pytest.raises(openai.NotFoundError) as raised:
            client.batches.create(input_file_id="file-1", **wrong)  # type: ignore[call-overload]
        assert raised.value.param == "input_file_id"
        with pytest.raises(openai.NotFoundError) as raised:
            client.files.list(after="file-1")
        assert raised.value.param == "after"


def test_forms_that_cannot_be_read_are_refused(server: KaonServer) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    with server.http() as http:
        assert http.post("/v1/files", json={}).status_code == 415
        for content in (b"", b"--x\r\n", b"--x\r\nContent-Disposition: form-data; name=file\r\n\r\nx\r\n--x--\r\n"):
            answer = http.post("/v1/files", content=content, headers=form)
            assert answer.status_code == 400, content
            assert answer.json()["error"]["type"] == "invalid_request_error"
        answer = http.post("/v1/files", content=b"", headers={"Content-Type": "multipart/form-data"})
        assert answer.status_code == 400


def kill_and_restart(
    start_server: Callable[..., KaonServer], folder: Path, lines: int, kills: int, chance: random.Random
) -> None:
    """Kill the server, or its engine, while it computes a batch; then the output must have each line once."""
    settings: dict[str, Any] = {"server_config": {"data_dir": str(folder)}}
    server = start_server(**settings).ready()
    with server.client() as client:
        batch = start(client, (chat(number) for number in range(lines)))
    for _ in range(kills):
        time.sleep(chance.uniform(0.0, 0.3))
        if chance.random() < 0.3:
            server.core.send_signal(signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.3))
        server.process.kill()
        server.process.wait()
        server = start_server(**settings).ready()
    with server.client() as client:
        batch = ended(client, batch)
        assert batch.status == "completed"
        output = read(client, batch.output_file_id)
        assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(lines)]
        answers = [line["response"]["body"]["choices"][0]["message"]["content"] for line in output]
        assert answers[7] == "7 + 7 = 14"
        assert batch.error_file_id is None


def test_no_line_is_lost_or_doubled_when_the_server_is_killed(
    start_server: Callable[..., KaonServer], tmp_path: Path
) -> None:
    # With this seed the engine is killed, and then the server.
    kill_and_restart(start_server, tmp_path / "data", 100, 1, random.Random(4))


@pytest.mark.slow  # Killed: the test above.
def test_a_server_that_ends_waits_for_no_batch_and_the_next_one_goes_on(
    start_server: Callable[..., KaonServer], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"server_config": {"data_dir": str(tmp_path / "data"), "drain_timeout": 600}}
    server = start_server(**settings).ready()
    with server.client() as client:
        batch = start(client, (chat(number, max_tokens=4000, ignore_eos=True) for number in range(500)))
        eventually(lambda: server.metric("kaon_requests_live") > 0)
    assert server.stop() == 0
    assert "Traceback" not in server.stderr
    server = start_server(**settings).ready()
    with server.client() as client:
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "in_progress"
        eventually(lambda: server.metric("kaon_requests_live") > 0)
        client.batches.cancel(batch.id)
        assert ended(client, batch).status == "cancelled"


@pytest.mark.slow  # Offline: test_a_full_disk_is_a_sentence; shares: tests/unit/server/test_batch_store.py.
def test_a_full_disk_and_a_full_share_refuse_an_upload_in_words(
    start_server: Callable[..., KaonServer], tmp_path: Path
) -> None:
    limits = {"data_dir": str(tmp_path / "data"), "max_file_bytes_per_key": 1_400_000}
    # In place of a full disk: larger files cannot be written.
    before = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    before += "resource.setrlimit(resource.RLIMIT_FSIZE, (1_200_000, 1_200_000)); "
    server = start_server(server_config=limits, before=before).ready()
    with server.client() as client:
        with pytest.raises(openai.APIStatusError, match="the file cannot be kept while it arrives: ") as full:
            client.files.create(file=bytes(1_300_000), purpose="batch")
        assert full.value.status_code == 507
        with pytest.raises(openai.RateLimitError, match="max_file_bytes_per_key"):
            client.files.create(file=bytes(2_000_000), purpose="batch")
        params = {"model": "kaon-demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x" * 1_300_000}]}
        large = {"requests": [{"custom_id": "a", "params": params}]}
        refused = server.post("/v1/messages/batches", large)
        assert refused.status_code == 507
        assert "the batch cannot be kept: File too large; try again later" in refused.json()["error"]["message"]
        assert client.files.create(file=bytes(10**6), purpose="batch").bytes == 10**6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_line_is_lost_or_doubled_through_fifty_kills(
    start_server: Callable[..., KaonServer], tmp_path: Path
) -> None:
    kill_and_restart(start_server, tmp_path / "data", 3000, 50, random.Random(2))


def test_a_file_is_answered_without_a_server_and_gone_on_with(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([chat(number) for number in range(6)] + [chat(6, temperature=9)]))
    # An earlier run answered one line, and was killed while it wrote the next.
    target.write_text('{"custom_id": "line-3", "response": {"earlier": true}}\n{"custom_id": "li')
    command = [sys.executable, "-m", "server", "run-batch", str(source), str(target), "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "1 of 6 lines failed" in done.stderr
    lines = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert len(target.read_text().splitlines()) == 7
    assert lines["line-3"]["response"] == {"earlier": True}
    assert lines["line-2"]["response"]["body"]["choices"][0]["message"]["content"] == "2 + 2 = 4"
    assert lines["line-6"]["response"]["status_code"] == 400


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([chat(1), chat(2)]))
    command = [sys.executable, "-m", "server", "run-batch", str(source), "/dev/full", "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "kaon run-batch: OUTPUT is /dev/full, which cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


# -- Anthropic's form -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def claude(server: KaonServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def message(number: int, **fields: Any) -> Any:
    question = {"role": "user", "content": f"What is {number} + {number}?"}
    params = {"model": "kaon-demo", "messages": [question], "temperature": 0, "max_tokens": 24, **fields}
    return {"custom_id": f"line-{number}", "params": params}


def test_a_message_batch_answers_as_messages_do(claude: anthropic.Anthropic) -> None:
    batch = claude.messages.batches.create(requests=[message(1), message(2), message(3, temperature=9)])
    assert batch.id.startswith("msgbatch_")
    assert batch.request_counts.processing == 3
    eventually(lambda: claude.messages.batches.retrieve(batch.id).processing_status == "ended")
    batch = claude.messages.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 2, 1, 0, 0)
    results = {each.custom_id: each.result for each in claude.messages.batches.results(batch.id)}
    assert [results[f"line-{number}"].type for number in (1, 2, 3)] == ["succeeded", "succeeded", "errored"]
    assert results["line-2"].message.content[0].text == "2 + 2 = 4"  # type: ignore[union-attr]
    assert results["line-3"].error.error.type == "invalid_request_error"  # type: ignore[union-attr]
    assert batch.id in [each.id for each in claude.messages.batches.list(limit=3)]
    claude.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(batch.id)


def test_a_message_batch_whose_files_were_deleted_is_still_listed_and_deleted(
    claude: anthropic.Anthropic, server: KaonServer
) -> None:
    batch = claude.messages.batches.create(requests=[message(1, temperature=9)])
    eventually(lambda: claude.messages.batches.retrieve(batch.id).processing_status == "ended")
    with server.client() as client:
        for file in client.files.list():
            if file.filename.startswith(batch.id):
                client.files.delete(file.id)
    assert claude.messages.batches.retrieve(batch.id).request_counts.errored == 1
    assert batch.id in [each.id for each in claude.messages.batches.list(limit=3)]
    claude.messages.batches.delete(batch.id)
    assert batch.id not in [each.id for each in claude.messages.batches.list(limit=3)]


def test_a_cancelled_message_batch_counts_what_was_not_answered(claude: anthropic.Anthropic) -> None:
    requests = [message(number, max_tokens=3000, stop_sequences=["never"]) for number in range(100)]
    batch = claude.messages.batches.create(requests=requests)
    with pytest.raises(anthropic.BadRequestError, match="has not ended"):
        claude.get(f"/v1/messages/batches/{batch.id}/results", cast_to=object)
    claude.messages.batches.cancel(batch.id)
    eventually(lambda: claude.messages.batches.retrieve(batch.id).processing_status == "ended")
    counts = claude.messages.batches.retrieve(batch.id).request_counts
    assert counts.canceled > 0
    assert counts.canceled + counts.succeeded == 100
    kinds = [each.result.type for each in claude.messages.batches.results(batch.id)]
    assert kinds.count("canceled") == counts.canceled


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        ([], "requests is an empty list"),
        ([message(1), message(1)], r"requests\[1\].custom_id is 'line-1', as in an earlier request"),
        ([{"custom_id": "a b", "params": {}}], r"requests\[0\].custom_id"),
    ],
)
def test_wrong_message_batches_are_refused_in_words(claude: anthropic.Anthropic, requests: Any, sentence: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=sentence):
        claude.messages.batches.create(requests=requests)
