"""A sleeping server frees memory, refuses requests in words, and continues every stream after wake-up."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.kaon_server import MODEL, KaonServer, eventually, free_port
from tests.e2e.processes import STUB_CORES
from tests.e2e.test_http_adapters import FORMS, PROMPT, Stream, complete, settings_of, tokens_of
from tests.parity.checkpoints import make_checkpoint

LENGTH = 800
"""Tokens of a stream, which takes most of a second or more."""


@pytest.fixture(autouse=True)
def _awake(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that fails, no server stays asleep for the next."""
    yield
    if "served" in request.fixturenames:
        assert call(request.getfixturevalue("served"), "/wake_up").status_code == 200


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, form: str) -> Iterator[KaonServer]:
    directory = tmp_path_factory.mktemp("sleep")
    base = make_checkpoint(directory / "base", max_position_embeddings=4096)
    running = KaonServer(
        directory / "log",
        free_port(),
        model=str(base),
        server_config={"served_model_name": ["base"]},
        **settings_of(form, base),
    ).ready()
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


@pytest.fixture(scope="module")
def alone(served: KaonServer) -> list[int]:
    """The stream's tokens without an interruption."""
    return Stream(served, "base", LENGTH).join()


def sleeps(server: KaonServer) -> bool:
    return bool(server.get("/is_sleeping").json()["is_sleeping"])


def call(server: KaonServer, path: str) -> httpx.Response:
    return httpx.post(server.url + path, timeout=120)


def cache_bytes(server: KaonServer) -> int:
    """Private memory of the core, without mapped files."""
    return int(psutil.Process(server.core.pid).memory_full_info().uss)


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_streams_are_held_and_go_on_where_they_were(
    served: KaonServer, form: str, alone: list[int], level: int
) -> None:
    stream = Stream(served, "base", LENGTH)
    eventually(lambda: len(stream.token_ids) > 20)
    core = served.core
    assert call(served, f"/sleep?level={level}").status_code == 200
    assert sleeps(served)
    assert not stream.is_over()
    # Ranks end at either level.
    assert core.is_running() == (level == 1 and form != "ranks")
    refused = complete(served, "base")
    assert refused.status_code == 503
    assert "the server sleeps; an operator wakes it with POST /wake_up" in refused.json()["error"]["message"]
    assert served.get("/readyz").status_code == 503
    assert served.get("/livez").status_code == 200
    # A second call changes nothing.
    assert call(served, f"/sleep?level={level}").status_code == 200
    held = len(stream.token_ids)
    assert served.get("/v1/models").status_code == 200
    assert len(stream.token_ids) == held
    assert call(served, "/wake_up").status_code == 200
    assert not sleeps(served)
    assert stream.join() == alone
    assert tokens_of(complete(served, "base")) == alone[:10]
    assert call(served, "/wake_up").status_code == 200


def test_level_1_gives_the_pages_of_the_kv_cache_back(served: KaonServer, form: str) -> None:
    if form == "ranks":
        pytest.skip("the processes of ranks end, as at level 2")
    bodies: list[dict[str, Any]] = [
        {"model": "base", "prompt": [9 + number % 200] * 480, "max_tokens": 8} for number in range(4)
    ]
    for body in bodies:
        assert served.post("/v1/completions", body).status_code == 200
    before = cache_bytes(served)
    assert call(served, "/sleep").status_code == 200
    asleep = cache_bytes(served)
    # Under load, 32 MiB of 256 or more are committed.
    assert before - asleep > 16 * 2**20
    assert call(served, "/wake_up").status_code == 200
    assert served.post("/v1/completions", bodies[0]).json()["usage"]["prompt_tokens_details"] in (
        None,
        {"cached_tokens": 0},
    )


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_core_that_is_killed_in_its_sleep_costs_no_stream(
    served: KaonServer, form: str, alone: list[int], level: int
) -> None:
    stream = Stream(served, "base", LENGTH)
    eventually(lambda: len(stream.token_ids) > 20)
    assert call(served, f"/sleep?level={level}").status_code == 200
    if level == 1 and form != "ranks":
        core = served.core
        core.send_signal(signal.SIGKILL)
        eventually(lambda: not core.is_running())
    assert sleeps(served)
    assert call(served, "/wake_up").status_code == 200
    assert stream.join() == alone


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/sleep?level=3", "level is '3'; it must be an integer between 1 and 2"),
        ("/sleep?mode=abort", "mode is not a parameter of /sleep; it takes level, model"),
        ("/wake_up?tags=weights", "tags is not a parameter of /wake_up; it takes model"),
    ],
)
def test_what_it_does_not_do_is_refused(served: KaonServer, path: str, words: str) -> None:
    answer = call(served, path)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == words
    assert not sleeps(served)


@pytest.mark.slow  # Awake: the end of `served`.
def test_a_sleeping_server_ends_in_order(tmp_path: Path) -> None:
    running = KaonServer(tmp_path / "log", free_port(), model=str(make_checkpoint(tmp_path / "base"))).ready()
    assert call(running, "/sleep?level=2").status_code == 200
    assert running.stop() == 0


def test_replicas_and_a_batch_sleep_together(tmp_path: Path) -> None:
    """Running lines are suspended, and those that begin meanwhile are retried until the server is awake."""
    running = KaonServer(
        tmp_path / "log",
        free_port(),
        before=STUB_CORES,
        environment={"STUB_CORE_COUNTS": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        parallel_config={"data_parallel_size": 2},
        server_config={"batch_concurrency": 8},
    ).ready()
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body} for number in range(12)
    ]
    with running.client() as client:
        text = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", text), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        streams = [Stream(running, MODEL, LENGTH) for _ in range(2)]
        eventually(lambda: all(stream.has_begun() for stream in streams))
        eventually(lambda: running.metric("kaon_requests_live") > 2)
        assert call(running, "/sleep?level=2").status_code == 200
        held = [len(stream.token_ids) for stream in streams]
        assert (
            running.metric('kaon_core_serving{replica="0"}') == running.metric('kaon_core_serving{replica="1"}') == 0
        )
        assert [len(stream.token_ids) for stream in streams] == held
        assert call(running, "/wake_up").status_code == 200
        first = 1000 + len(PROMPT)
        assert [stream.join() for stream in streams] == [list(range(first, first + LENGTH))] * 2
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (12, 0)
    assert running.metric('kaon_core_restarts_total{replica="0"}') == 0
    assert running.stop() == 0
