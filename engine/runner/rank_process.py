"""The process of a tensor-parallel rank other than 0: `python -m engine.runner.rank_process`.

`RankProc` starts it. It starts a runner in the order of `engine.runner.start`, with messages to and from the engine
core as the barriers, and executes the steps that rank 0 sends until the core ends.
"""

import gc
import logging
import os
import select
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from engine.config.config import Config
from engine.distributed.logs import configure_logging
from engine.distributed.processes import begin_child, end_with_parent_even_if_stuck, name_process
from engine.distributed.rank_link import (
    MAX_BYTES,
    Allocate,
    FromRank,
    Join,
    RankFailed,
    RankLaunch,
    RankLoaded,
    RankRaised,
    RankServes,
    RankSized,
    ToRank,
)
from engine.distributed.rank_steps import ABORTED, AdapterMessage, decode_message
from engine.distributed.step_transport import open_steps
from models.torch_import import importing_torch

if TYPE_CHECKING:
    from engine.runner.model_runner import ModelRunner

logger = logging.getLogger("engine.runner.rank_process")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ToRank)


def main() -> int:
    """Run a rank for the engine core, which is connected to standard input. Returns the exit code."""
    core = begin_child()
    end_with_parent_even_if_stuck()
    _end_with(core)
    launch = _receive(core)
    assert isinstance(launch, RankLaunch)
    name_process(launch.name)
    config = Config.model_validate_json(launch.config)
    configure_logging(launch.share.titled(launch.name), config.server_config.log_level)
    try:
        _serve(config, launch, core)
    except (ValueError, MemoryError) as error:
        logger.debug("start-up failed", exc_info=True)
        _send(core, RankFailed(str(error) or "memory ran out while the model was loaded", usage=True))
    except Exception as error:
        logger.exception("this rank ends")
        _send(core, RankFailed(f"{type(error).__name__}: {error}", usage=False))
    return 1


def _serve(config: Config, launch: RankLaunch, core: socket.socket) -> None:
    steps = open_steps(launch.steps, launch.shard.rank, launch.shard.size)
    with importing_torch():
        from engine.runner.build import load_rank
        from engine.runner.memory_sizing import KVCacheSize
        from engine.runner.start import start_runner
        from models.errors import CollectiveAborted

    loaded, own_cpus, group, world = load_rank(
        config, Path(launch.path), launch.shard, launch.lockstep_member, launch.share
    )
    assert group is not None

    def rendezvous() -> None:
        num_parameters = sum(weight.numel() for weight in loaded.model.parameters())
        _send(core, RankLoaded(sorted(own_cpus), num_parameters))
        _expect(core, Join)
        if world is not None:
            world.join()
        group.join()

    def agree(size: KVCacheSize) -> tuple[int, int]:
        _send(core, RankSized(size.num_blocks, size.num_slots))
        allocate = _expect(core, Allocate)
        return allocate.num_blocks, allocate.num_slots

    runner = start_runner(loaded, rendezvous=rendezvous, agree=agree)
    gc.freeze()
    _send(core, RankServes())
    while True:
        message = decode_message(steps.read())
        failure = ""
        if isinstance(message, AdapterMessage):
            steps.report(_change_adapter(runner, message))
            continue
        try:
            group.begin_step(message.number)
            runner.follow(message)
        except CollectiveAborted:
            failure = ABORTED
        except BaseException as error:  # noqa: BLE001 - reported to rank 0, which fails the step
            group.abort()
            sentence = " ".join(str(error).split()) or type(error).__name__
            logger.error("step %d failed: %s", message.number, sentence)
            _send(core, RankRaised(message.number, sentence))
            failure = f"{sentence}\n{traceback.format_exc()}"
        steps.report(failure)


def _change_adapter(runner: "ModelRunner", message: AdapterMessage) -> str:
    """Attach or remove an adapter. Returns "" or the reason why it could not be attached."""
    try:
        if message.path is None:
            runner.unload_adapter(message.number)
        else:
            runner.load_adapter(message.number, message.path, runner.read_adapter(message.path))
    except (ValueError, MemoryError, OSError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _end_with(core: socket.socket) -> None:
    """Start a thread that exits this process as soon as the engine core has ended, whatever the process is doing."""
    poller = select.poll()
    poller.register(core, 0)  # poll() reports a hang-up whatever events are requested.

    def watch() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _send(core: socket.socket, message: FromRank) -> None:
    core.send(_encoder.encode(message))


def _receive(core: socket.socket) -> ToRank:
    packet = core.recv(MAX_BYTES)
    if not packet:
        # The core has ended, so no process is left that this error could be reported to.
        os._exit(1)
    message: ToRank = _decoder.decode(packet)
    return message


_Message = TypeVar("_Message", bound=ToRank)


def _expect(core: socket.socket, kind: type[_Message]) -> _Message:
    message = _receive(core)
    assert isinstance(message, kind)
    return message


if __name__ == "__main__":
    sys.exit(main())
