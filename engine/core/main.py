"""The process of an engine core, `python -m engine.core.main`: loads the model and runs `EngineCore`'s busy loop.

Started by `engine.distributed.core_process`.
"""

import contextlib
import gc
import logging
import os
import socket
import threading
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from engine.config.config import Config
from engine.core.engine_core import EngineCore
from engine.core.kv_events import KVEventPublisher
from engine.core.sockets import CoreSockets, Wake
from engine.core.startup import PhaseClock, StartedModel, start_model
from engine.distributed.core_process import LOST_FRONT_END, Launch
from engine.distributed.flight_record import FlightRecord
from engine.distributed.lockstep import PEER_END_SECONDS, LockstepMember, PeerLostError, RendezvousError, ReplicaLinks
from engine.distributed.logs import configure_logging
from engine.distributed.processes import begin_child, end_with_parent, name_process
from engine.distributed.rank_link import RankError
from engine.distributed.rank_manager import AsyncIOProcManager
from engine.full_collections import FullCollections
from engine.messages import Failed, Ready
from engine.text.structured.matcher import Matchers

logger = logging.getLogger("engine.core.main")


def main() -> NoReturn:
    """Run one engine core for the parent process, which holds the other end of standard input, and exit."""
    lifeline = begin_child()
    launch = msgspec.json.decode(lifeline.makefile("rb").readline(), type=Launch)
    name_process(launch.name)
    with contextlib.suppress(OSError):  # The system may have taken these CPUs offline.
        os.sched_setaffinity(0, launch.cpus)
    threading.excepthook = _end_process
    ranks = _Ranks(launch)
    member = launch.lockstep_member
    rendezvous = [member.directory] if member is not None and member.directory else []
    end_with_parent(lifeline, launch.directory, *rendezvous, on_ended=ranks.announce_shutdown)
    config = Config.model_validate_json(launch.config)
    configure_logging(launch.share.titled(launch.name), config.server_config.log_level)
    sockets = _open_sockets(config, launch)
    failure = _run(config, launch, sockets, ranks)
    if failure is not None:
        sockets.output_queue.put(failure)
    sockets.close()
    logging.shutdown()
    # A normal exit would destroy objects that native threads still use, and free gigabytes object by object.
    os._exit(0 if failure is None else 1)


def _open_sockets(config: Config, launch: Launch) -> CoreSockets:
    """Open the sockets to the front end. If a front end on another host is lost, this process ends."""

    def end(sentence: str) -> NoReturn:
        logger.critical("the engine core ends: %s", sentence)
        logging.shutdown()
        os._exit(LOST_FRONT_END)

    outputs = None if launch.outputs is None else socket.socket(fileno=launch.outputs)
    timeout = config.parallel_config.rank_start_timeout
    try:
        sockets = CoreSockets(launch.input_address, outputs, config.kv_cache_block_size, launch.front_end, timeout)
    except ConnectionError as error:
        end(str(error))
    sockets.watch(end)
    return sockets


def _end_process(end: threading.ExceptHookArgs) -> None:
    """End this process because a thread raised: without that thread, requests would wait for ever."""
    name = end.thread.name if end.thread is not None else "?"
    logger.critical("the engine core ends, as its thread %s did", name, exc_info=end.exc_value)
    logging.shutdown()
    os._exit(1)


def _fail(
    sockets: CoreSockets, sentence: str, killed: bool = False, collateral: bool = False, usage: bool = False
) -> None:
    """Send the reason and end this process, from any thread."""
    logger.critical("the engine core ends: %s", sentence)
    sockets.output_queue.put(Failed(sentence, usage, killed=killed, collateral=collateral))
    sockets.close()
    logging.shutdown()
    os._exit(1)


class _Ranks:
    """The other ranks of this core. Another thread may announce the end of this process to them."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._manager: AsyncIOProcManager | None = None

    def start(self, config: Config, sockets: CoreSockets, path: Path) -> AsyncIOProcManager:
        """Start the ranks; see `AsyncIOProcManager`. `path` is the checkpoint."""
        launch = self._launch
        self._manager = AsyncIOProcManager(
            config,
            launch.directory,
            partial(_fail, sockets),
            path,
            lockstep_member=launch.lockstep_member,
            share=launch.share,
        )
        return self._manager

    def announce_shutdown(self, why: str) -> None:
        """Notify the started ranks that no core will follow. `why` is a sentence, or "" at an orderly end."""
        if self._manager is not None:
            self._manager.announce_shutdown(why)

    def close(self) -> None:
        """End the started ranks."""
        if self._manager is not None:
            self._manager.close()


def _run(config: Config, launch: Launch, sockets: CoreSockets, ranks: _Ranks) -> Failed | None:
    """Load the model and serve it until a shutdown. Returns the failure, or None."""
    try:
        failure = _load_and_serve(config, launch, sockets, ranks)
        if failure is None or failure.usage:
            ranks.announce_shutdown("" if failure is None else failure.error)
        return failure
    finally:
        ranks.close()


def _load_and_serve(config: Config, launch: Launch, sockets: CoreSockets, ranks: _Ranks) -> Failed | None:
    """See `_run`."""
    phases = PhaseClock(launch.started)
    record = FlightRecord(launch.flight_record)
    os.close(launch.flight_record)
    links = None if launch.lockstep_member is None else _links(launch.lockstep_member, sockets)
    try:
        has_ranks = config.parallel_config.tensor_parallel_size > 1
        start_ranks = partial(ranks.start, config, sockets) if has_ranks else None
        model = start_model(config, phases, start_ranks, links, launch.share)
        core = _core(model, sockets, record, links, launch.share.replica)
        core.produce_token()
        if links is not None:
            links.remove_directory()
    except RendezvousError as error:
        return Failed(str(error), usage=not error.is_over, collateral=error.is_over)
    except (ValueError, MemoryError, RankError) as error:
        logger.debug("start-up failed", exc_info=True)
        return Failed(str(error) or "memory ran out while the model was loaded; use a smaller one", usage=True)
    except PeerLostError as error:
        return Failed(str(error), collateral=True)
    except Exception as error:
        logger.exception("start-up failed")
        gone = None if links is None else links.wait_gone(PEER_END_SECONDS)
        if gone is not None:
            return Failed(str(PeerLostError(gone)), collateral=True)
        return Failed(f"the engine core could not start: {type(error).__name__}: {error}")
    # Exclude torch's objects from garbage collection: a full collection would visit them all and delay a step.
    gc.freeze()
    phases.end("warm-up")
    matchers = Matchers(model.load_tokenizer, model.info.vocab_size, model.info.eos_token_ids)
    sockets.serve(matchers, core.interrupt_for)
    sockets.output_queue.put(Ready(model.info, phases.seconds))
    try:
        core.busy_loop()
    except PeerLostError as error:
        return Failed(str(error), collateral=True)
    except BaseException as error:
        logger.exception("the busy loop ended")
        return Failed(f"the engine core failed: {type(error).__name__}: {error}")
    return None


def _links(lockstep_member: LockstepMember, sockets: CoreSockets) -> ReplicaLinks:
    """Open the links to the cores of the other replicas in lockstep."""

    def end(replica: int) -> None:
        _fail(sockets, str(PeerLostError(replica)), collateral=True)

    return ReplicaLinks(lockstep_member, lambda number: sockets.input_queue.put(Wake(number)), end)


def _core(
    model: StartedModel, sockets: CoreSockets, record: FlightRecord, links: ReplicaLinks | None, replica: int
) -> EngineCore:
    """Create the engine core of a started model. Raises `ValueError` if KV events cannot be published."""
    config, events = model.config, model.config.kv_events_config
    parts = config, model.scheduler, model.runner, sockets.input_queue, sockets.output_queue
    kv_events = None
    if events.kv_events_endpoint is not None:
        kv_events = KVEventPublisher(events, replica, config.kv_cache_block_size)
    if links is None:
        return EngineCore(*parts, record=record, kv_events=kv_events, collections=FullCollections())
    from engine.core.dp_engine_core import DPEngineCoreProc, Lockstep

    assert model.world is not None
    lockstep = Lockstep(model.world, links)
    return DPEngineCoreProc(*parts, lockstep, record=record, kv_events=kv_events, collections=FullCollections())


if __name__ == "__main__":
    main()
