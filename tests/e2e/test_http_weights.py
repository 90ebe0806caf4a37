"""Weights are replaced while the server runs: streams continue, faults leave the present ones, and no prefix is
found."""

import fcntl
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.kaon_server import KaonServer, eventually, free_port
from tests.e2e.processes import command_line
from tests.e2e.test_http_adapters import PROMPT, TOKENS, Stream, complete, tokens_of
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import Reference

pytestmark = pytest.mark.usefixtures("warm_children")

LENGTH = 200
BOTH = [True, False]
"""Whether the new weights are loaded while the present ones serve, or in their place."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[int]]:
    """Greedy tokens after the prompt, of two checkpoints that differ only in their weights."""
    (directory / "allowed").mkdir()
    paths = {
        name: make_checkpoint(directory / "allowed" / name, seed=seed, max_position_embeddings=4096)
        for seed, name in enumerate(("old", "new"))
    }
    return {name: Reference(path).greedy(PROMPT, TOKENS) for name, path in paths.items()}


def serve(directory: Path, log: str, **settings: Any) -> KaonServer:
    return KaonServer(
        directory / log,
        free_port(),
        model=str(directory / "allowed" / "old"),
        server_config={"served_model_name": ["base"], "weights_directories": [str(directory / "allowed")]},
        **settings,
    ).ready()


@pytest.fixture(scope="module")
def served(directory: Path, expected: dict[str, list[int]]) -> Iterator[KaonServer]:
    assert expected["old"] != expected["new"]
    running = serve(directory, "log")
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


def update(server: KaonServer, path: Path, **fields: Any) -> httpx.Response:
    return server.post("/update_weights", {"model_path": str(path), **fields})


def kept(answer: httpx.Response) -> str:
    """The answer's message that explains why nothing has changed."""
    message: str = answer.json()["error"]["message"]
    assert answer.status_code in (400, 503), message
    assert message.startswith("the present weights stay in use: ")
    return message


class Traffic:
    """Streams one after another: each is complete, and begins with the tokens `first` or, for later ones, `then`."""

    def __init__(self, server: KaonServer, first: list[int], then: list[int]) -> None:
        self._server, self._first, self._then = server, first, then
        self._is_over = threading.Event()
        self._began: list[list[int]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(lambda: bool(self._began))
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        assert self._began[0] == self._first
        num_first = self._began.count(self._first)
        later = self._began[num_first:]
        if later and later[0] != self._then:
            # The weights changed within the first tokens of this one.
            assert later.pop(0)[0] == self._first[0]
        assert later == [self._then] * len(later)

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._began.append(Stream(self._server, "base", LENGTH).join()[:TOKENS])


def test_streams_go_on_with_the_new_weights(
    served: KaonServer, directory: Path, expected: dict[str, list[int]]
) -> None:
    old, new = directory / "allowed" / "old", directory / "allowed" / "new"
    with Traffic(served, expected["old"], expected["new"]):
        answer = update(served, new, alongside=True)
        assert (answer.status_code, answer.json()["model_path"]) == (200, str(new))
        # The prompt was computed before, but its prefix is no longer found.
        assert tokens_of(complete(served, "base")) == expected["new"]
    # A core that is restarted has the new weights too.
    served.core.kill()
    assert tokens_of(complete(served, "base")) == expected["new"]
    with Traffic(served, expected["new"], expected["old"]):
        assert update(served, old, alongside=False).status_code == 200
        assert tokens_of(complete(served, "base")) == expected["old"]
    assert served.metric("kaon_core_restarts_total") == 1


def broken(directory: Path, kind: str) -> tuple[Path, str]:
    """A checkpoint with a fault, and words of its error message."""
    path = directory / "allowed" / kind
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(directory / "allowed" / "new", path)
    weights, config, tokenizer = path / "model.safetensors", path / "config.json", path / "tokenizer.json"
    match kind:
        case "half-written":
            weights.write_bytes(weights.read_bytes()[:-100])
            return path, "is truncated or is not a safetensors file"
        case "half-a-header":
            weights.write_bytes(weights.read_bytes()[:100])
            return path, "is truncated or is not a safetensors file"
        case "without-a-tensor":
            save_file({name: each for name, each in load_file(weights).items() if "0.mlp.up" not in name}, weights)
            return path, "mlp.up_proj"
        case "other-shapes":
            shutil.rmtree(path)
            make_checkpoint(path, hidden_size=128, max_position_embeddings=2048)
            return path, "max_model_len of the new weights is 2048, and of the present ones 4096"
        case "other-words":
            tokenizer.write_text(tokenizer.read_text() + " ")
            return path, "vocabularies cannot"
        case _:
            config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 32}))
            return path, "where the model needs [307, 32] by config.json"


FIRST = [("half-written", True), ("without-a-tensor", False)]
OTHERS = ["half-a-header", "other-shapes", "other-words", "wrong-config", "without-a-tensor"]


@pytest.mark.parametrize(
    ("kind", "alongside"),
    [*FIRST, *(pytest.param(kind, side, marks=pytest.mark.slow) for kind in OTHERS for side in BOTH)],
)
def test_weights_that_cannot_be_served_leave_the_present_ones(
    served: KaonServer, directory: Path, expected: dict[str, list[int]], kind: str, alongside: bool
) -> None:
    core = served.core.pid
    path, words = broken(directory, kind)
    with Traffic(served, expected["old"], expected["old"]):
        assert words in kept(update(served, path, alongside=alongside))
    assert tokens_of(complete(served, "base")) == expected["old"]
    assert served.core.pid == core or not alongside


@pytest.mark.parametrize("alongside", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_core_that_is_killed_while_it_reads_the_weights_costs_nothing(
    served: KaonServer, directory: Path, expected: dict[str, list[int]], alongside: bool
) -> None:
    new = directory / "allowed" / "new"
    before = {each.pid for each in cores(served)}
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # The default action of the lease's signal would end this process.
    with (new / "generation_config.json").open("rb+") as held, Traffic(served, expected["old"], expected["old"]):
        # A process that opens the file waits until the lease ends.
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        answer: list[httpx.Response] = []
        updating = threading.Thread(target=lambda: answer.append(update(served, new, alongside=alongside)))
        updating.start()
        eventually(lambda: any(each.pid not in before for each in cores(served)))
        if alongside:
            assert tokens_of(complete(served, "base")) == expected["old"]
        next(each for each in cores(served) if each.pid not in before).kill()
        updating.join()
    assert "was killed by SIGKILL" in kept(answer[0])
    assert answer[0].status_code == 503
    assert tokens_of(complete(served, "base")) == expected["old"]


def update_while_a_process_dies(server: KaonServer, new: Path, parallel: str) -> httpx.Response:
    """Kill the last of several new processes as it starts: importing torch takes it longer than being detected."""
    before = {each.pid for each in cores(server)}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(update, server, new, alongside=True)
        eventually(lambda: bool(parts_of_new_cores(server, before, parallel)))
        parts_of_new_cores(server, before, parallel)[-1].kill()
        return answer.result()


def parts_of_new_cores(server: KaonServer, before: set[int], parallel: str) -> list[psutil.Process]:
    """The two replicas, or the rank of one core that is a process of its own, once they exist."""
    new = [each for each in cores(server) if each.pid not in before]
    if parallel == "data_parallel_size":
        return new if len(new) == 2 else []
    return [rank for core in new for rank in core.children() if "engine.runner.rank_process" in command_line(rank)]


def cores(server: KaonServer) -> list[psutil.Process]:
    return [each for each in server.process.children() if "engine.core.main" in command_line(each)]


def test_what_may_not_be_read_is_refused_in_words(served: KaonServer, directory: Path) -> None:
    outside = update(served, directory / "allowed" / "..")
    assert (outside.status_code, outside.json()["error"]["param"]) == (403, "model_path")
    assert "not beneath a directory of weights_directories" in outside.json()["error"]["message"]
    assert "which is not a directory" in update(served, directory / "allowed" / "nothing").json()["error"]["message"]
    (directory / "allowed" / "empty").mkdir(exist_ok=True)
    assert "has config.json; both must have it, or neither" in kept(update(served, directory / "allowed" / "empty"))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "data_parallel_size"])
@pytest.mark.parametrize("alongside", BOTH)
def test_ranks_and_replicas_change_together(
    directory: Path, expected: dict[str, list[int]], parallel: str, alongside: bool
) -> None:
    running = serve(directory, f"log-{parallel}-{alongside}", parallel_config={parallel: 2})
    try:
        first, then = expected["old"], expected["new"]
        with Traffic(running, first, then), Traffic(running, first, then):
            path, _ = broken(directory, "without-a-tensor")
            kept(update(running, path, alongside=alongside))
            assert tokens_of(complete(running, "base")) == first
            if alongside:
                message = kept(update_while_a_process_dies(running, directory / "allowed" / "new", parallel))
                assert "was killed by SIGKILL" in message
                assert tokens_of(complete(running, "base")) == first
            assert update(running, directory / "allowed" / "new", alongside=alongside).status_code == 200
            for _ in range(4):
                assert tokens_of(complete(running, "base")) == then
    finally:
        assert running.stop() == 0
    assert "Traceback" not in running.stderr
