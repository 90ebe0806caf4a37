"""Adapters are loaded and unloaded while the server runs: streams continue, faults change nothing, new cores have
all."""

import fcntl
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.kaon_server import KaonServer, eventually, free_port
from tests.parity.adapters import make_adapter, merge, read_weights
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import Reference, prompt

TOKENS = 10
LONG, SHORT = 800, 200
"""Tokens of a stream that runs during other actions, and of one during which the core ends at once."""
PROMPT = prompt(40, seed=1)
NAMES = ("base", "wide", "narrow")
FORMS = ["one", *(pytest.param(form, marks=pytest.mark.slow) for form in ("drafts", "ranks"))]
"""Kinds of engines: one process, one that verifies a model's drafts, and two ranks that do."""


def settings_of(form: str, checkpoint: Path) -> dict[str, Any]:
    """The settings of an engine of this kind, whose drafts are the model's own."""
    settings: dict[str, Any] = {}
    if form != "one":
        settings["speculative_config"] = {"speculative_model": str(checkpoint)}
    if form == "ranks":
        settings["parallel_config"] = {"tensor_parallel_size": 2}
    return settings


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[int]]:
    """Greedy tokens after the prompt: transformers', of the base and of each merged adapter."""
    checkpoint = make_checkpoint(directory / "base", max_position_embeddings=4096)
    base = read_weights(checkpoint)
    paths = [checkpoint]
    for name, rank in (("wide", 8), ("narrow", 2)):
        deltas = make_adapter(directory / "allowed" / name, base, rank=rank, alpha=rank, seed=rank)
        paths.append(merge(directory / f"merged-{name}", checkpoint, base, deltas))
    return {name: Reference(path).greedy(PROMPT, TOKENS) for name, path in zip(NAMES, paths, strict=True)}


def serve(directory: Path, log: str, **settings: Any) -> KaonServer:
    return KaonServer(
        directory / log,
        free_port(),
        model=str(directory / "base"),
        server_config={
            "served_model_name": ["base"],
            "lora_directories": [str(directory / "allowed")],
            "max_lora_adapters": 3,
        },
        **settings,
    ).ready()


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def served(directory: Path, expected: dict[str, list[int]], form: str) -> Iterator[KaonServer]:
    assert len({str(tokens) for tokens in expected.values()}) == len(NAMES)
    running = serve(directory, f"log-{form}", **settings_of(form, directory / "base"))
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


@pytest.fixture
def load(served: KaonServer, directory: Path) -> Iterator[Callable[..., httpx.Response]]:
    """Loads an adapter of the allowed directory; all are unloaded after the test."""

    def send(name: str, path: str | None = None, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(directory / "allowed" / (path or name)), **fields}
        return served.post("/v1/load_lora_adapter", body)

    yield send
    for name in listed(served):
        if name != "base":
            assert unload(served, name).status_code == 200


def unload(server: KaonServer, name: str) -> httpx.Response:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def listed(server: KaonServer) -> list[str]:
    return [model["id"] for model in server.get("/v1/models").json()["data"]]


def complete(server: KaonServer, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return server.post("/v1/completions", {**body, "return_token_ids": True, **fields})


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def connections(server: KaonServer) -> list[object]:
    """Number of clients' connections to the server."""
    found = psutil.Process(server.process.pid).net_connections("tcp")
    return [each for each in found if each.status == psutil.CONN_ESTABLISHED and each.laddr.port == server.port]


class Stream:
    """A long completion, read by a thread of its own."""

    def __init__(self, server: KaonServer, model: str, length: int) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._server, self._model, self._length = server, model, length
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def has_begun(self) -> bool:
        return bool(self.token_ids)

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> list[int]:
        self._thread.join()
        assert self.finish_reason == "length"
        assert len(self.token_ids) == self._length
        return self.token_ids

    def _read(self) -> None:
        body = {"model": self._model, "prompt": PROMPT, "temperature": 0, "max_tokens": self._length}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
        with self._server.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    self.token_ids += choice.get("token_ids") or []
                    self.finish_reason = choice["finish_reason"] or self.finish_reason


def until_resumed(server: KaonServer, attempt: Callable[[], None]) -> None:
    """Make attempts to kill the core while a stream runs, until one did: the stream may have ended before."""
    for _ in range(5):
        before = server.metric("kaon_requests_resumed_total")
        attempt()
        if server.metric("kaon_requests_resumed_total") > before:
            return
    pytest.fail("each stream ended before the core was killed")


def test_an_adapter_is_loaded_used_and_unloaded(
    served: KaonServer, expected: dict[str, list[int]], load: Callable[..., httpx.Response]
) -> None:
    assert complete(served, "wide").status_code == 404
    answer = load("wide")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'wide' added successfully.")
    assert listed(served) == ["base", "wide"]
    assert tokens_of(complete(served, "wide")) == expected["wide"]
    assert tokens_of(complete(served, "base")) == expected["base"]
    answer = unload(served, "wide")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'wide' removed successfully.")
    assert listed(served) == ["base"]
    assert complete(served, "wide").status_code == 404
    assert tokens_of(complete(served, "base")) == expected["base"]


def test_another_adapter_under_a_name_finds_no_prefix_of_the_last(
    served: KaonServer, expected: dict[str, list[int]], load: Callable[..., httpx.Response]
) -> None:
    for path in ("wide", "narrow"):
        assert load("mine", path).status_code == 200
        assert tokens_of(complete(served, "mine")) == expected[path]
        assert unload(served, "mine").status_code == 200


def test_a_stream_ends_with_the_adapter_that_is_unloaded_or_replaced_meanwhile(
    served: KaonServer, expected: dict[str, list[int]], load: Callable[..., httpx.Response]
) -> None:
    assert load("mine", "wide").status_code == 200
    alone = Stream(served, "mine", LONG).join()
    replaced = Stream(served, "mine", LONG)
    eventually(replaced.has_begun)
    assert load("mine", "narrow", load_inplace=True).status_code == 200
    assert not replaced.is_over()
    assert tokens_of(complete(served, "mine")) == expected["narrow"]
    unloaded = Stream(served, "mine", LONG)
    eventually(unloaded.has_begun)
    answer: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answer.append(unload(served, "mine")))
    waiting.start()
    eventually(lambda: listed(served) == ["base"])
    assert complete(served, "mine").status_code == 404
    assert replaced.join() == alone
    assert unloaded.join()[:TOKENS] == expected["narrow"]
    waiting.join()
    assert answer[0].status_code == 200


def broken(directory: Path, kind: str) -> tuple[str, str]:
    """An adapter with a fault, and words of its error message."""
    path = directory / "allowed" / kind
    shutil.copytree(directory / "allowed" / "wide", path, dirs_exist_ok=True)
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    fields = json.loads(config.read_text())
    match kind:
        case "half-written":
            weights.write_bytes(weights.read_bytes()[:-100])
            return kind, "is truncated or is not a safetensors file"
        case "without-weights":
            weights.unlink()
            return kind, "has no adapter_model.safetensors"
        case "half-written-config":
            config.write_text(config.read_text()[:40])
            return kind, "adapter_config.json"
        case "wrong-rank":
            config.write_text(json.dumps({**fields, "r": 3}))
            return kind, "by its rank and config.json"
        case "unsupported":
            config.write_text(json.dumps({**fields, "use_dora": True}))
            return kind, "use_dora"
        case _:
            other = make_checkpoint(directory / "other", hidden_size=128)
            make_adapter(path, read_weights(other), rank=4, alpha=4)
            return kind, "by its rank and config.json"


KINDS = ["half-written", "without-weights", "half-written-config", "wrong-rank", "unsupported", "other-shapes"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_cannot_be_served_changes_nothing(
    served: KaonServer,
    directory: Path,
    expected: dict[str, list[int]],
    load: Callable[..., httpx.Response],
    kind: str,
) -> None:
    assert load("mine", "narrow").status_code == 200
    stream = Stream(served, "mine", 100)
    eventually(stream.has_begun)
    path, words = broken(directory, kind)
    for fields in ({"name": "other"}, {"name": "mine", "load_inplace": True}):
        answer = load(path=path, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "lora_path")
        assert words in error["message"]
    assert listed(served) == ["base", "mine"]
    assert stream.join()[:TOKENS] == expected["narrow"]
    assert tokens_of(complete(served, "mine")) == expected["narrow"]


def test_what_may_not_be_loaded_is_refused_in_words(
    served: KaonServer, directory: Path, load: Callable[..., httpx.Response]
) -> None:
    def refusal(answer: httpx.Response) -> tuple[int, str, str]:
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]

    (directory / "allowed" / "link").unlink(missing_ok=True)
    (directory / "allowed" / "link").symlink_to(directory / "base")
    for path in ("..", "link", "../../etc", "/etc", "wide/../../base"):
        status, param, message = refusal(load("mine", path))
        assert (status, param) == (403, "lora_path")
        assert "not beneath a directory of lora_directories" in message
    (directory / "allowed" / "linked").mkdir(exist_ok=True)
    config = directory / "allowed" / "linked" / "adapter_config.json"
    config.unlink(missing_ok=True)
    config.symlink_to(directory / "base" / "config.json")
    status, param, message = refusal(load("mine", "linked"))
    assert (status, param) == (403, "lora_path")
    assert "whose file 'adapter_config.json' is a link to a file elsewhere" in message
    for path in ("nothing", "x" * 300):  # A component of a path has 255 bytes at most.
        assert refusal(load("mine", path))[:2] == (404, "lora_path")
    assert refusal(load("base", "wide"))[:2] == (400, "lora_name")
    assert refusal(unload(served, "mine"))[:2] == (404, "lora_name")
    assert served.post("/v1/load_lora_adapter", {"lora_name": "mine"}).status_code == 400
    for name in ("a\nb", "\u2028", "a\x1b[2K"):
        status, param, message = refusal(load(name, "wide"))
        assert (status, param) == (400, "lora_name")
        assert "a line break or another character that cannot be shown" in message
    for name in ("a", "b", "c"):
        assert load(name, "wide").status_code == 200
    assert load("a", "narrow", load_inplace=True).status_code == 200
    status, param, message = refusal(load("a", "wide"))
    assert (status, param) == (400, "lora_name")
    assert "set load_inplace to true" in message
    status, param, message = refusal(load("d", "wide"))
    assert (status, param) == (400, "lora_name")
    assert "loads 3 at most (max_lora_adapters)" in message


def test_a_core_that_is_killed_comes_back_with_the_adapters_that_were_loaded(
    served: KaonServer, expected: dict[str, list[int]], load: Callable[..., httpx.Response]
) -> None:
    assert load("gone", "narrow").status_code == 200
    assert load("mine", "wide").status_code == 200
    assert unload(served, "gone").status_code == 200
    alone = Stream(served, "mine", SHORT).join()

    def kill() -> None:
        stream = Stream(served, "mine", SHORT)
        eventually(lambda: len(stream.token_ids) > TOKENS)
        served.core.kill()
        assert stream.join() == alone

    until_resumed(served, kill)
    assert tokens_of(complete(served, "mine")) == expected["wide"]
    assert listed(served) == ["base", "mine"]


def test_a_core_that_is_killed_while_it_loads_loses_nothing(
    served: KaonServer, expected: dict[str, list[int]], load: Callable[..., httpx.Response]
) -> None:
    assert load("mine", "wide").status_code == 200

    def kill() -> None:
        stream = Stream(served, "mine", SHORT)
        eventually(stream.has_begun)
        os.kill(served.core.pid, signal.SIGSTOP)
        busy = len(connections(served))
        answer: list[httpx.Response] = []
        loading = threading.Thread(target=lambda: answer.append(load("other", "narrow")))
        loading.start()
        eventually(lambda: len(connections(served)) > busy)
        served.core.kill()
        loading.join()
        assert answer[0].status_code == 503
        assert "load" in answer[0].json()["error"]["message"]
        assert stream.join()[:TOKENS] == expected["wide"]

    until_resumed(served, kill)
    assert listed(served) == ["base", "mine"]
    assert tokens_of(complete(served, "mine")) == expected["wide"]
    assert load("other", "narrow").status_code == 200
    assert tokens_of(complete(served, "other")) == expected["narrow"]


def test_a_core_that_is_killed_while_it_reads_an_adapter_loses_nothing(
    served: KaonServer,
    directory: Path,
    expected: dict[str, list[int]],
    load: Callable[..., httpx.Response],
) -> None:
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # The default action of the lease's signal would end this process.

    def kill() -> None:
        stream = Stream(served, "base", SHORT)
        answer: list[httpx.Response] = []
        loading = threading.Thread(target=lambda: answer.append(load("late", "wide")))
        with (directory / "allowed" / "wide" / "adapter_model.safetensors").open("rb+") as held:
            # A process that opens the file waits until the lease ends.
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            loading.start()
            eventually(lambda: stream.has_begun() and fcntl.fcntl(held, fcntl.F_GETLEASE) != fcntl.F_WRLCK)
            # The last rank, if there are several.
            [*_, victim] = (served.core, *served.core.children())
            victim.kill()
            loading.join()
        assert answer[0].status_code == 503
        assert "died while it loaded the adapter, so the adapter is not loaded" in answer[0].json()["error"]["message"]
        assert listed(served) == ["base"]
        assert stream.join()[:TOKENS] == expected["base"]

    until_resumed(served, kill)
    assert load("late", "wide").status_code == 200
    assert tokens_of(complete(served, "late")) == expected["wide"]
