"""A front end that cannot continue: its end, and the reason that the engine core sends to hosts with its ranks."""

import signal
import socket
import subprocess
import sys
from typing import Any, NoReturn, Self

import pytest

import server.http
import server.process
from engine.client import llm_engine
from engine.client.supervisor import Supervisor
from engine.config.config import Config, ParallelConfig
from engine.config.settings import ModelList
from engine.distributed.core_process import CoreProcess
from engine.distributed.processes import ENDED, REMOVED
from engine.messages import Failed
from models.errors import CheckpointError
from tests.unit.client.test_supervisor_stalls import Keeper
from tests.unit.stub_supervisors import Cluster

WHY = "tokenizer.json cannot be read. Check it; é"

CHILD = """
import threading
from engine.distributed.processes import end_with_parent, take_lifeline
end_with_parent(take_lifeline(), on_ended=lambda why: print(repr(why), flush=True))
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("said", "heard"),
    [(b"", ""), (REMOVED, ""), (ENDED, "''\n"), (REMOVED + ENDED + WHY.encode(), f"{WHY!r}\n")],
)
def test_a_process_that_is_ended_hears_why_and_ends(said: bytes, heard: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen([sys.executable, "-c", CHILD], stdin=theirs, stdout=subprocess.PIPE) as child:
        theirs.close()
        ours.sendall(said)
        ours.shutdown(socket.SHUT_WR)
        assert child.communicate()[0].decode() == heard


@pytest.mark.parametrize("why", ["", WHY])
def test_a_core_with_ranks_on_other_hosts_gets_the_reason_of_its_end(why: str) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, nnodes=2)
    core = CoreProcess(Config(parallel_config=parallel))
    theirs = core._theirs.dup()
    core.stop(0.0, why)
    with theirs:
        assert theirs.makefile("rb").read() == ENDED + why.encode()


@pytest.mark.parametrize("is_failure", [False, True])
def test_an_orderly_end_has_no_why(is_failure: bool) -> None:
    keeper = Keeper()
    supervisor = Supervisor(Config(), keeper)  # type: ignore[arg-type]
    supervisor.end(Failed(WHY, usage=is_failure))
    assert keeper.link.closed_for == (WHY if is_failure else "")


def test_all_cores_end_at_once_and_for_that_reason() -> None:
    with Cluster(2) as cluster:
        cluster.manager.fail(WHY)
        assert cluster.manager.failure == Failed(WHY, usage=True)
        assert [stub.failure for stub in cluster.stubs] == [Failed(WHY, usage=True)] * 2


class Core:
    """A replacement of `CoreManager`."""

    last: Self

    def __init__(self, config: Config, *, starts: bool = True, model: str = "") -> None:
        self.ends: list[str] = []
        type(self).last = self

    def fail(self, why: str) -> None:
        self.ends.append(why)

    def shutdown(self) -> None:
        self.ends.append("shut down")


@pytest.mark.parametrize(
    ("outcome", "ends"),
    [
        (WHY, [WHY]),
        (None, []),
        (ZeroDivisionError("oh"), ["the server failed: ZeroDivisionError: oh"]),
    ],
)
def test_the_server_says_why_it_failed_and_nothing_where_it_was_asked_to_end(
    outcome: Any, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(config: Config, cores: list[Core], models: ModelList, listener: socket.socket, *_: object) -> str | None:
        listener.close()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    monkeypatch.setattr(server.process, "CoreManager", Core)
    monkeypatch.setattr(server.process, "name_process", lambda name: None)
    monkeypatch.setattr(server.process, "prefer_event_loop", lambda: None)  # It would last for all later tests.
    monkeypatch.setattr(server.process, "_set_up_logging", lambda config: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(server.http, "serve", serve)
    config = Config.from_fields(port=0)
    if isinstance(outcome, Exception):
        with pytest.raises(type(outcome)):
            server.process.run(config)
    else:
        assert server.process.run(config) == (1 if ends else 0)
    assert Core.last.ends == [*ends, "shut down"]


@pytest.mark.parametrize(("error", "ends"), [(CheckpointError(WHY), [WHY]), (KeyboardInterrupt(), [])])
def test_so_does_an_engine_whose_tokenizer_cannot_be_read(
    error: BaseException, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(checkpoint: object) -> NoReturn:
        raise error

    monkeypatch.setattr(llm_engine, "CoreManager", Core)
    monkeypatch.setattr(llm_engine.Tokenizer, "from_checkpoint", fail)
    with pytest.raises(type(error)):
        llm_engine.LLMEngine()
    assert Core.last.ends == [*ends, "shut down"]
