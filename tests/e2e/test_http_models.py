"""Several models at one address: each is loaded for its requests, and an eviction or fault of one affects no other."""

import fcntl
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.kaon_server import KaonServer, eventually, free_port
from tests.e2e.processes import STUB_CORES, command_line
from tests.e2e.test_http_adapters import PROMPT, Stream, complete, tokens_of

pytestmark = pytest.mark.usefixtures("warm_children")

SOON = "import server.models; server.models._RETRY_SECONDS = 1e-6; server.models._CLOSED_SHARE = 0.005; "
MODELS = """\
memory_gib: 2
models:
  - {served_model_name: [one, uno], memory_gib: 1, load: start}
  - {served_model_name: two, memory_gib: 1}
  - {served_model_name: three, memory_gib: 1, max_num_seqs: 4}
  - {served_model_name: broken, memory_gib: 1, model: BROKEN}
"""
NAMES = ["one", "two", "three", "broken"]
LENGTH = 400
"""Tokens of a stream, which takes seconds."""
FIRST_TOKEN = 1000 + len(PROMPT)
"""Fields of a stub core, whose tokens count."""


class ModelsServer(KaonServer):
    """Its models are stubs; `gate` blocks the cores that start while it is locked."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.gate = directory / "gate"
        self.gate.touch()
        self.broken = directory / "broken"
        file = directory / "models.yaml"
        file.write_text(MODELS.replace("BROKEN", str(self.broken)))
        super().__init__(
            directory / "log",
            free_port(),
            before=STUB_CORES + SOON,
            environment={
                "STUB_CORE_COUNTS": "1",
                "STUB_CORE_STEP": "0.005",
                "STUB_CORE_GATE": str(self.gate),
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(":")]
                ),
            },
            server_config={"models": str(file), "model_wait_timeout": 250, **settings},
        )

    def cores_of(self, model: str) -> list[psutil.Process]:
        return [each for each in self.cores() if command_line(each)[-1:] == [model]]

    def loaded(self) -> list[str]:
        return [name for name in NAMES if self.metric(f'kaon_model_loaded{{model="{name}"}}')]

    def use(self, *names: str) -> None:
        for name in names:
            assert tokens_of(complete(self, name)) == list(range(FIRST_TOKEN, FIRST_TOKEN + 10))

    def load(self, *names: str) -> None:
        """Load these two models; the first of them is the least recently used."""
        # Another owner's model may stay for a while after it was loaded, so that one of these two makes room.
        eventually(lambda: self.use(*names) is None and self.loaded() == [name for name in NAMES if name in names])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelsServer]:
    running = ModelsServer(tmp_path_factory.mktemp("models"))
    running.ready()
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_names_are_listed_and_probes_and_scrapes_load_nothing(server: ModelsServer) -> None:
    assert server.start_line.startswith("Kaon")
    assert "serving one, uno, two, three, broken on" in server.start_line
    assert server.loaded() == ["one"]
    assert [command_line(core)[-2:] for core in server.cores()] == [["kaon-engine-0", "one"]]
    assert [each["id"] for each in server.get("/v1/models").json()["data"]] == ["one", "uno", *NAMES[1:]]
    for path in ("/readyz", "/health", "/metrics", "/v1/models/two", "/livez", "/openapi.json", "/kaon/limits"):
        assert server.get(path).status_code == 200
    assert server.loaded() == ["one"]
    assert server.metric('kaon_core_serving{model="one"}') == 1
    assert server.metric('kaon_core_serving{model="two"}') == 0
    assert server.metric('kaon_model_loads_total{model="two"}') == 0


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}


def test_every_route_serves_the_model_that_the_body_names(server: ModelsServer) -> None:
    server.load("one", "two")
    before = server.metric('kaon_model_requests_total{model="two"}')
    for path, body in ROUTES.items():
        assert server.post(path, {**body, "model": "two"}).status_code == 200, path
        unknown = server.post(path, {**body, "model": "four"})
        assert unknown.status_code == 404, path
        assert "'four', which this server does not serve; use one or uno or two" in unknown.text
    assert server.metric('kaon_model_requests_total{model="two"}') == before + 4
    embedded = server.post("/v1/embeddings", {"model": "two", "input": "hi"})
    assert "this endpoint needs one that is served to embed" in error_of(embedded)[1]
    assert server.loaded() == ["one", "two"]


def test_a_batch_and_a_stream_that_goes_on_are_of_their_model(server: ModelsServer) -> None:
    line = '{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": %s}'
    body = '{"model": "%s", "prompt": "hi", "max_tokens": 2}'
    lines = "\n".join(line % (name, body % name) for name in ("two", "three", "four"))
    with server.client() as client:
        file = client.files.create(file=("lines.jsonl", lines.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None
        assert done.error_file_id is not None
        answers = client.files.content(done.output_file_id).text
        assert '"model":"two"' in answers
        assert '"model":"three"' in answers
        assert "model_not_found" in client.files.content(done.error_file_id).text
    fields = {"model": "three", "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream": True}
    begun = server.post("/v1/completions", fields, **{"X-Kaon-Resumable": "true"}).text
    ids = [each[4:] for each in begun.splitlines() if each.startswith("id: ")]
    rest = server.post("/v1/completions", fields, **{"Last-Event-ID": ids[0]}).text
    assert rest == begun[begun.index(f"id: {ids[1]}") :]


def test_the_least_recently_used_model_makes_room(server: ModelsServer) -> None:
    server.load("one", "two")
    evictions = server.metric('kaon_model_evictions_total{model="one"}')
    restarts = server.metric('kaon_core_restarts_total{model="one"}')
    server.use("three")
    assert server.loaded() == ["two", "three"]
    assert len(server.cores()) == 2
    server.use("two", "uno")
    assert server.loaded() == ["one", "two"]
    assert server.metric('kaon_model_evictions_total{model="one"}') == evictions + 1
    # A core that was ended to make room has not died.
    assert server.metric('kaon_core_restarts_total{model="one"}') == restarts


def test_no_stream_is_cut_and_none_keeps_another_model_out(server: ModelsServer) -> None:
    server.load("one", "two")
    streams = [Stream(server, name, LENGTH) for name in ("one", "two")]
    eventually(lambda: all(stream.has_begun() for stream in streams))
    with ThreadPoolExecutor() as threads:
        third = threads.submit(server.use, "three")
        eventually(lambda: "queued" in server.get("/kaon/limits").text and queued(server) == 1)
        # Both are in use, so that new requests for one of them wait until the third model has been served.
        more = [threads.submit(server.use, name) for name in ("one", "two")]
        assert [stream.join() for stream in streams] == [list(range(FIRST_TOKEN, FIRST_TOKEN + LENGTH))] * 2
        for each in (third, *more):
            each.result()
    assert queued(server) == 0


def test_requests_for_a_model_do_not_wait_for_another_owners_stream(server: ModelsServer) -> None:
    server.load("one", "two")
    streams = [Stream(server, name, 2 * LENGTH) for name in ("one", "two")]
    eventually(lambda: all(stream.has_begun() for stream in streams))
    with ThreadPoolExecutor() as threads:
        third = threads.submit(server.use, "three")
        eventually(lambda: queued(server) == 1)
        for name in ("one", "two"):
            assert complete_from("127.0.0.2", server, name).status_code == 200
        assert not any(stream.is_over() for stream in streams)
        assert not third.done()
        for stream in streams:
            assert stream.join() == list(range(FIRST_TOKEN, FIRST_TOKEN + 2 * LENGTH))
        third.result()


def test_owners_take_turns_at_having_models_loaded(server: ModelsServer) -> None:
    server.broken.symlink_to(Path("models/demo/checkpoint").resolve())
    server.load("two", "three")
    before = len(server.stderr)
    with server.gate.open() as gate, ThreadPoolExecutor() as threads:
        fcntl.flock(gate, fcntl.LOCK_EX)
        asked = []
        # A request for a model that is still loaded would not wait.
        for name, left in (("one", ["three"]), ("two", [])):
            asked.append(threads.submit(server.use, name))
            eventually(lambda left=left: server.loaded() == left)  # type: ignore[misc]
        asked.append(threads.submit(server.use, "three"))
        eventually(lambda: queued(server) == 3)
        asked.append(threads.submit(complete_from, "127.0.0.2", server, "broken"))
        eventually(lambda: queued(server, "127.0.0.2") == 1)
        fcntl.flock(gate, fcntl.LOCK_UN)
        for each in asked:
            each.result()
    order = re.findall(r"to make room for (\w+)", server.stderr[before:])
    assert order == ["one", "two", "broken", "three"]
    server.broken.unlink()


def complete_from(address: str, server: ModelsServer, model: str = "two") -> httpx.Response:
    """A completion for another owner: on a server without keys, another address."""
    with client_at(address, server) as http:
        return http.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 2})


def client_at(address: str, server: ModelsServer) -> httpx.Client:
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(transport=transport, base_url=server.url, timeout=60)


def queued(server: ModelsServer, address: str = "127.0.0.1") -> int:
    with client_at(address, server) as http:
        count: int = http.get("/kaon/limits").json()["in_use"]["queued_sequences"]
    return count


def test_a_model_that_cannot_be_loaded_costs_no_other_and_serves_once_it_can(server: ModelsServer) -> None:
    server.load("one", "two")
    stream = Stream(server, "one", LENGTH)
    refused = complete(server, "broken")
    assert refused.status_code == 503
    sentence = error_of(refused)[1]
    assert sentence.startswith("model broken cannot be loaded: ")
    assert str(server.broken) in sentence
    assert int(refused.headers["retry-after"]) >= 1
    assert server.get("/readyz").status_code == 200
    server.broken.symlink_to(Path("models/demo/checkpoint").resolve())
    eventually(lambda: complete(server, "broken").status_code == 200)
    server.broken.unlink()
    assert stream.join() == list(range(FIRST_TOKEN, FIRST_TOKEN + LENGTH))


def test_a_core_that_is_killed_while_its_model_loads_costs_no_other_and_the_model_is_served_later(
    server: ModelsServer,
) -> None:
    """A model that is loaded for the first time is then refused; one that was loaded before gets another core."""
    server.load("one", "two")
    stream = Stream(server, "one", LENGTH)
    eventually(stream.has_begun)
    with ThreadPoolExecutor() as threads:
        with server.gate.open() as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            asked = threads.submit(complete, server, "three")
            eventually(lambda: server.cores_of("three") != [])
            for core in server.cores_of("three"):
                core.kill()
        answer = asked.result()
    if answer.status_code != 200:
        assert error_of(answer) == (503, "model three cannot be loaded: the engine core was killed by SIGKILL")
        assert int(answer.headers["retry-after"]) >= 1
    assert stream.join() == list(range(FIRST_TOKEN, FIRST_TOKEN + LENGTH))
    eventually(lambda: complete(server, "three").status_code == 200)
