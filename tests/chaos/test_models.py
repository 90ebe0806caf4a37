"""Several models at one address: their cores are killed, delayed and put to sleep, and no other model is affected."""

import contextlib
import fcntl
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.held_checkpoint import HeldCheckpoint
from tests.e2e.kaon_server import KaonServer, eventually, free_port
from tests.e2e.processes import command_line
from tests.e2e.test_http_adapters import PROMPT, TOKENS, Stream, complete, tokens_of
from tests.e2e.test_http_models import FIRST_TOKEN, LENGTH, NAMES, ModelsServer, complete_from, error_of, queued
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import Reference


def serving(directory: Path, **settings: Any) -> contextlib.AbstractContextManager[ModelsServer]:
    """A server, which is ended also if the test fails."""
    return ModelsServer(directory, **settings).serving()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelsServer]:
    with serving(tmp_path_factory.mktemp("models")) as running:
        yield running


@contextlib.contextmanager
def held(server: ModelsServer) -> Iterator[Callable[[], None]]:
    """Cores that start within the block become ready when the yielded function is called, or after the block."""
    with server.gate.open() as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(gate, fcntl.LOCK_UN)


def test_a_core_that_is_killed_leaves_the_others_alone(server: ModelsServer) -> None:
    server.load("one", "two")
    pids = {each.pid for each in server.cores()}
    server.use("three")
    (third,) = (each for each in server.cores() if each.pid not in pids)
    streams = [Stream(server, name, LENGTH) for name in ("two", "three")]
    eventually(lambda: all(stream.has_begun() for stream in streams))
    third.kill()
    assert [stream.join() for stream in streams] == [list(range(FIRST_TOKEN, FIRST_TOKEN + LENGTH))] * 2
    assert server.metric('kaon_core_restarts_total{model="three"}') == 1
    assert server.metric('kaon_core_restarts_total{model="two"}') == 0


@pytest.mark.slow
def test_a_core_that_is_killed_while_it_loads_is_said_and_tried_again(tmp_path: Path) -> None:
    with serving(tmp_path, max_queued_requests=2) as server, ThreadPoolExecutor() as threads, held(server) as release:
        stream = Stream(server, "one", LENGTH)
        killed = threads.submit(complete, server, "two")
        eventually(lambda: len(server.cores()) == 2)
        server.cores()[1].kill()
        assert error_of(killed.result()) == (
            503,
            "model two cannot be loaded: the engine core was killed by SIGKILL",
        )
        # As many requests may wait as the queue allows, and one of another owner.
        waiting = [threads.submit(complete, server, "two") for _ in range(2)]
        eventually(lambda: queued(server) == 2)
        refused = complete(server, "two")
        assert refused.status_code == 429
        assert "2 requests are waiting" in error_of(refused)[1]
        assert float(refused.headers["retry-after"]) > 0
        waiting.append(threads.submit(complete_from, "127.0.0.2", server))
        eventually(lambda: queued(server, "127.0.0.2") == 1)
        release()
        assert [each.result().status_code for each in waiting] == [200] * 3
        assert stream.join() == list(range(FIRST_TOKEN, FIRST_TOKEN + LENGTH))


@pytest.mark.slow
def test_a_request_that_waited_too_long_for_a_model_is_refused_and_the_model_loads(tmp_path: Path) -> None:
    with serving(tmp_path, model_wait_timeout=0.2) as server, held(server) as release:
        status, sentence = error_of(complete(server, "two"))
        assert status == 503
        assert sentence.startswith("model two could not be loaded within 0.2 s (model_wait_timeout)")
        release()
        eventually(lambda: complete(server, "two").status_code == 200)


@pytest.mark.slow
def test_a_stop_refuses_what_waits_for_a_model_and_lets_streams_end(tmp_path: Path) -> None:
    with serving(tmp_path) as server, ThreadPoolExecutor() as threads, held(server):
        stream = Stream(server, "one", LENGTH)
        waiting = threads.submit(complete, server, "two")
        eventually(lambda: queued(server) == 1 and stream.has_begun())
        server.process.send_signal(signal.SIGTERM)
        refused = waiting.result()
        assert error_of(refused) == (503, "the server is shutting down; send the request again later")
        assert stream.join() == list(range(FIRST_TOKEN, FIRST_TOKEN + LENGTH))
        assert server.wait() == 0


@pytest.mark.slow
def test_calls_for_operators_name_their_model(server: ModelsServer) -> None:
    server.load("one", "two")
    assert httpx.post(f"{server.url}/sleep").json()["error"]["message"] == (
        "model is missing; this server has several, so name one of one, two, three, broken"
    )
    assert httpx.post(f"{server.url}/sleep?model=two&level=2", timeout=60).status_code == 200
    assert server.get("/is_sleeping?model=two").json() == {"is_sleeping": True}
    assert complete(server, "two").status_code == 503
    # A sleeping model keeps its memory: the other model makes room for the third.
    server.use("one", "three")
    assert server.loaded() == ["two", "three"]
    assert httpx.post(f"{server.url}/wake_up?model=two", timeout=60).status_code == 200
    server.use("two")


@pytest.mark.slow
def test_many_clients_of_more_models_than_fit_all_get_their_answers(server: ModelsServer) -> None:
    def client(number: int) -> None:
        for turn in range(3):
            server.use(NAMES[(number + turn) % 3])

    with ThreadPoolExecutor() as threads:
        list(threads.map(client, range(4)))
    assert len(server.loaded()) == 2


@pytest.mark.slow
def test_models_of_two_ranks_with_drafters_make_room_and_lose_no_stream(tmp_path: Path) -> None:
    """Real engines: one is evicted under load, one loses a rank, and one is killed while it loads."""
    paths = {
        name: make_checkpoint(tmp_path / name, seed=seed, max_position_embeddings=4096)
        for seed, name in enumerate(("one", "two", "three"))
    }
    expected = {name: Reference(path).greedy(PROMPT, TOKENS) for name, path in paths.items()}
    held = HeldCheckpoint(tmp_path / "held", paths["three"])
    served = {**paths, "three": held.path}
    lines = [
        f"  - {{served_model_name: {name}, model: {served[name]}, speculative_model: {paths[name]}, memory_gib: 1}}"
        for name in paths
    ]
    (tmp_path / "models.yaml").write_text("\n".join(["memory_gib: 2", "models:", *lines]))
    running = KaonServer(
        tmp_path / "log",
        free_port(),
        before="import server.models; server.models._RETRY_SECONDS = 1e-6; ",
        parallel_config={"tensor_parallel_size": 2},
        cpu_kvcache_gib=0.1,
        server_config={"models": str(tmp_path / "models.yaml")},
    ).ready()

    def core_of(name: str) -> psutil.Process:
        [core] = (each for each in running.process.children() if command_line(each)[-2:] == ["kaon-engine-0", name])
        return core

    def is_loaded(name: str) -> bool:
        return bool(running.metric(f'kaon_model_loaded{{model="{name}"}}'))

    def processes_of(name: str) -> list[psutil.Process]:
        return [each for each in running.process.children() if command_line(each)[-1:] == [name]]

    try:
        for name in ("one", "two"):
            assert tokens_of(complete(running, name)) == expected[name]
        with ThreadPoolExecutor() as threads:
            streams = {name: Stream(running, name, 1500) for name in ("one", "two")}
            eventually(lambda: all(stream.has_begun() for stream in streams.values()))
            core_of("two").children()[-1].kill()
            # The first that ends makes room.
            third = threads.submit(complete, running, "three")
            for name, stream in streams.items():
                assert stream.join()[:TOKENS] == expected[name]
            assert tokens_of(third.result()) == expected["three"]
            for name in ("one", "two"):
                assert tokens_of(complete(running, name)) == expected[name]
            eventually(lambda: not is_loaded("three") and not processes_of("three"))
            stream = Stream(running, "one", 1500)
            with held.held():
                killed = threads.submit(complete, running, "three")
                eventually(lambda: bool(processes_of("three")))
                core_of("three").kill()
            # A model that was loaded before gets another core, as after a later death.
            assert tokens_of(killed.result()) == expected["three"]
            assert stream.join()[:TOKENS] == expected["one"]
    finally:
        assert running.stop() == 0
    assert "Traceback" not in running.stderr
