"""`EngineCore`: the busy loop that schedules, computes and answers; `python -m engine.engine_core` is its process.

Started by `CoreManager` through `engine.core_process`. Sockets are `engine.core_io`'s room.
"""

import contextlib
import gc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, NoReturn, Protocol

import msgspec

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config import Config
from engine.core_io import CoreSockets, Incoming, InputQueue, OutputQueue, Wake
from engine.core_process import LOST_FRONT_END, Launch
from engine.core_startup import LoadedModel, PhaseClock, load_model
from engine.deferred_steps import DeferredSteps, LaunchingRunner
from engine.flight_record import FlightRecord
from engine.isolation import FailedStep, Isolation
from engine.lifetime import begin_child, end_with_parent, name_process
from engine.messages import (
    AbortRequests,
    Failed,
    Ready,
    RequestOutput,
    Shutdown,
    StepOutputs,
    Stopped,
    terminal_output,
)
from engine.replica_links import PEER_END_SECONDS, MeetingError, PeerGoneError, ReplicaLinks
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.seats import Seat
from engine.sequence import Sequence
from engine.step_limits import StepOutOfMemory
from engine.structured.matchers import Matchers
from engine.worker.async_proc import AsyncIOProcManager
from engine.worker.rank_places import RankError
from engine.worker.shard import HostShare

logger = logging.getLogger("engine.engine_core")

_CANARY_ID = -1
_CANARY_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
"""The request that shows whether the engine works at all."""

_PREPARE_AFTER_IDLE_SECONDS = 0.05
"""An idle core makes later steps quicker after this long: not between two requests of one client."""

_CHECK_AFTER_IDLE_SECONDS = 1.0
"""An idle core checks its own integrity after this long: never between two requests of a busy one."""


class Runner(LaunchingRunner, Protocol):
    """What the loop needs of `ModelRunner`; `launch` where `async_scheduling` is on."""

    def forward(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput: ...


class EngineCore:
    """Feeds the scheduler from `input_queue`, runs its steps, and puts one `StepOutputs` a step on `output_queue`.

    Every sequence taken in ends in exactly one terminal output. `config` has its `num_kvcache_blocks` filled in.
    """

    def __init__(
        self,
        config: Config,
        runner: Runner,
        input_queue: InputQueue,
        output_queue: OutputQueue,
        *,
        window: int | None = None,
        blocks_at_first: int | None = None,
        prepare_ahead: Callable[[], bool] | None = None,
        record: FlightRecord | None = None,
    ) -> None:
        """`window`: tokens that a query of the model sees, where all its layers have one. `blocks_at_first`: of the
        KV cache, where it grows with its use.

        `prepare_ahead`, called while the core is idle, makes later steps quicker and tells whether more would.
        `record` is told of each step.
        """
        self.scheduler = Scheduler(config, window=window, blocks_at_first=blocks_at_first)
        self.runner = runner
        self.input_queue = input_queue
        self.output_queue = output_queue
        self._block_size = config.kv_cache_block_size
        self._outputs = _Outputs()
        self._record = record or FlightRecord.of_its_own(config.max_num_seqs)
        self._isolation = Isolation(self.scheduler, self._compute_and_tell)
        self._in_silence = Isolation(self.scheduler, self._compute)
        self._deferred: DeferredSteps | None = None
        if config.async_scheduling == "on":
            self._deferred = DeferredSteps(self.scheduler, runner, self._record, self._outputs, self._send)
        self._suspects: deque[Sequence] = deque()
        """Sequences that an earlier core died on, each to be tried alone."""
        self._stopping = False
        self._prepare_ahead = prepare_ahead

    def busy_loop(self) -> None:
        """Serve until a `Shutdown` arrives; then end what runs, say `Stopped`, and return."""
        self._serve()
        self._drain()
        live = (*self.scheduler.running, *self.scheduler.waiting)
        self._outputs.put_nowait(self.scheduler.abort([seq.id for seq in live]))
        self._send("idle", 0.0)
        self.output_queue.put(Stopped())

    def _serve(self) -> None:
        self.pull_and_process_input_queue()
        while not self._stopping:
            self._process_engine_step()
            self.pull_and_process_input_queue()

    def produce_token(self) -> None:
        """Run one request of one token through scheduler and model. Raises `RuntimeError` if that does not work."""
        error = self._try_canary()
        if error is not None:
            raise RuntimeError(f"the model produced no token: {error}")

    def pull_and_process_input_queue(self) -> None:
        """Take in all that has arrived. With nothing to run, answer it and sleep until something has."""
        while True:
            self._take_in(self._arrived())
            if self._stopping or self._deferred or self.scheduler.has_requests():
                return
            if self._outputs:
                self._send("idle", 0.0)
            self._take_in([self._wait_idle()])

    def _arrived(self) -> Iterator[Incoming]:
        while not self.input_queue.empty():
            yield self.input_queue.get_nowait()

    def _wait_idle(self) -> Incoming:
        with contextlib.suppress(Empty):
            return self.input_queue.get(timeout=_PREPARE_AFTER_IDLE_SECONDS)
        while self._prepare_ahead is not None and self.input_queue.empty() and self._prepare_ahead():
            pass
        with contextlib.suppress(Empty):
            return self.input_queue.get(timeout=_CHECK_AFTER_IDLE_SECONDS)
        self.scheduler.check_integrity()
        return self.input_queue.get()

    def _take_in(self, messages: Iterable[Incoming]) -> None:
        """Aborts go last and together: the scheduler looks through all that is live, however few they are."""
        aborted: list[int] = []
        for message in messages:
            match message:
                case Sequence():
                    self._take_in_sequence(message)
                case AbortRequests():
                    aborted += message.request_ids
                case Shutdown():
                    self._stopping = True
        if aborted:
            self._outputs.put_nowait(self.scheduler.abort(aborted))

    def _take_in_sequence(self, seq: Sequence) -> None:
        # Should it end this process before any step, it is known whose fault that was.
        self._record.begin([seq.id])
        try:
            self.scheduler.add(seq)
        except ValueError as error:
            self._outputs.put_nowait([terminal_output(seq.id, "error", str(error))])
        else:
            if seq.is_suspect:
                self._suspects.append(seq)
        self._record.end()
        if self._deferred is not None:
            self._deferred.note_again()

    def _process_engine_step(self) -> None:
        """Run a step and send what came of it."""
        start = time.perf_counter()
        kind = self._step()
        if kind is not None:
            self._send(kind, time.perf_counter() - start)

    def _step(self) -> str | None:
        """Schedule, compute, postprocess; the step's kind, or None if there is nothing to tell of."""
        if self._suspects:
            self._drain()
            # One alone: should it end this process too, it is known whose fault that was.
            failed = self._isolation.run([self._suspects.popleft()])
            if failed is not None:
                self._fail_guilty(failed)
            return "idle" if self._outputs else None
        if self._deferred is not None:
            failed = self._deferred.advance()
            if failed is not None:
                self._fail_guilty(failed)
            return "idle" if failed is not None and self._outputs else None
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        batch, seqs = scheduled
        error = self._compute(batch, seqs)
        if error is not None:
            self._fail_guilty(FailedStep(list(seqs.values()), error, batch.total_tokens_num))
        return batch.kind

    def _drain(self) -> None:
        """Read the steps that run."""
        failed = None if self._deferred is None else self._deferred.drain()
        if failed is not None:
            self._fail_guilty(failed)

    def _compute_and_tell(self, batch: ScheduledBatch, seqs: dict[int, Sequence]) -> BaseException | None:
        """As `_compute`, and send what came of it: whoever waits must not take many steps for none."""
        start = time.perf_counter()
        error = self._compute(batch, seqs)
        self._send(batch.kind, time.perf_counter() - start)
        return error

    def _compute(self, batch: ScheduledBatch, seqs: dict[int, Sequence]) -> BaseException | None:
        """Run a scheduled step and take its tokens back; what it raised, its sequences waiting again."""
        self._record.begin(batch.req_ids)
        try:
            output = self.runner.forward(batch)
        except BaseException as error:  # a panic of native code is no `Exception`
            logger.exception("a step of %d sequences failed", len(seqs))
            self.scheduler.retract(seqs.values())
            return error
        self.scheduler.postprocess(list(seqs.values()), output, self._outputs)
        self._record.end()
        return None

    def _fail_guilty(self, failed: FailedStep) -> None:
        """End the sequences that made a step raise; the others go on. Raises `RuntimeError` if every step does.

        One that found no memory is nobody's fault as long as smaller ones can be tried.
        """
        if isinstance(failed.error, StepOutOfMemory) and self.scheduler.shrink_steps(
            failed.num_tokens, len(failed.seqs)
        ):
            return
        for seq, error in self._isolation.guilty(failed):
            canary_error = self._try_canary()
            if canary_error is not None:
                # Whoever starts this core again should know in what company it broke.
                self._record.begin([each.id for each in failed.seqs])
                raise RuntimeError(f"steps fail whatever they compute: {canary_error}") from error
            sentence = f"the step that computed this request failed: {str(error) or type(error).__name__}"
            outputs = self.scheduler.fail([seq], sentence)
            for output in outputs:
                output.is_poison = True
            self._outputs.put_nowait(outputs)

    def _try_canary(self) -> str | None:
        """Compute a request of one token, which nobody made; what went wrong."""
        canary = Sequence([0], self._block_size, _CANARY_PARAMS, id=_CANARY_ID)
        self.scheduler.add(canary)
        failed = self._in_silence.run([canary])
        if failed is not None:
            self.scheduler.abort([_CANARY_ID])
            return str(failed.error) or type(failed.error).__name__
        return self._outputs.take_one(_CANARY_ID).error

    def _send(self, step_kind: str, step_seconds: float) -> None:
        self.output_queue.put(StepOutputs(self._outputs.take(), self.scheduler.stats(step_kind, step_seconds)))


class _Outputs:
    """Collects request outputs until the step's message is sent."""

    def __init__(self) -> None:
        self._collected: list[RequestOutput] = []

    def __bool__(self) -> bool:
        return bool(self._collected)

    def put_nowait(self, outputs: list[RequestOutput], /) -> None:
        if self._collected:
            self._collected += outputs
        else:
            self._collected = outputs

    def take(self) -> list[RequestOutput]:
        taken, self._collected = self._collected, []
        return taken

    def take_one(self, seq_id: int) -> RequestOutput:
        """The one output of a sequence."""
        (taken,) = (output for output in self._collected if output.request_id == seq_id)
        self._collected = [output for output in self._collected if output is not taken]
        return taken


def main() -> NoReturn:
    """Run one engine core for the parent that holds the other end of standard input, and end the process."""
    lifeline = begin_child()
    launch = msgspec.json.decode(lifeline.makefile("rb").readline(), type=Launch)
    name_process(launch.name)
    with contextlib.suppress(OSError):  # The system may have taken them from all of us.
        os.sched_setaffinity(0, launch.cpus)
    threading.excepthook = _end_process
    ranks: list[AsyncIOProcManager] = []

    def part() -> None:
        for each in ranks:
            each.part()

    meeting_place = [] if launch.seat is None else [launch.seat.directory]
    end_with_parent(lifeline, launch.directory, *meeting_place, on_ended=part)
    config = Config.model_validate_json(launch.config)
    logging.basicConfig(
        level=config.server_config.log_level.upper(), format=f"{launch.name} %(levelname)s %(name)s: %(message)s"
    )
    sockets = _open_sockets(config, launch)
    failure = _run(config, launch, sockets, ranks)
    if failure is not None:
        sockets.output_queue.put(failure)
    sockets.close()
    logging.shutdown()
    # The interpreter would take apart what native threads may still look at, and give gigabytes back one by one.
    os._exit(0 if failure is None else 1)


def _open_sockets(config: Config, launch: Launch) -> CoreSockets:
    """The way to the front end. Ends this process where there is none to one on another host, now or later."""

    def end(sentence: str) -> NoReturn:
        logger.critical("the engine core ends: %s", sentence)
        os._exit(LOST_FRONT_END)

    addresses = launch.input_address, launch.output_address
    timeout = config.parallel_config.rank_start_timeout
    try:
        sockets = CoreSockets(*addresses, config.kv_cache_block_size, launch.front_end, timeout)
    except ConnectionError as error:
        end(str(error))
    sockets.watch(end)
    return sockets


def _end_process(end: threading.ExceptHookArgs) -> None:
    """End this process with a thread that raised: without one of them, requests would wait for ever."""
    name = end.thread.name if end.thread is not None else "?"
    logger.critical("the engine core ends, as its thread %s did", name, exc_info=end.exc_value)
    os._exit(1)


def _fail(
    sockets: CoreSockets, sentence: str, killed: bool = False, collateral: bool = False, usage: bool = False
) -> None:
    """End this process from any thread, whatever the others do, and say why."""
    logger.critical("the engine core ends: %s", sentence)
    sockets.output_queue.put(Failed(sentence, usage, killed=killed, collateral=collateral))
    sockets.close()
    os._exit(1)


def _run(config: Config, launch: Launch, sockets: CoreSockets, ranks: list[AsyncIOProcManager]) -> Failed | None:
    """Load the model and serve it until told to stop; what went wrong, if anything did.

    `ranks` is given the manager of the ranks behind the first, once they are started.
    """
    phases = PhaseClock(launch.started)
    record = FlightRecord(launch.flight_record)
    os.close(launch.flight_record)
    with ExitStack() as ends:

        def start_ranks(path: Path) -> AsyncIOProcManager:
            fail = partial(_fail, sockets)
            manager = AsyncIOProcManager(config, launch.directory, fail, path, seat=launch.seat, share=launch.share)
            ends.callback(manager.close)
            ranks.append(manager)
            return manager

        failure = _load_and_serve(config, launch.seat, launch.share, sockets, phases, record, start_ranks)
        if failure is None or failure.usage:
            for each in ranks:
                each.part("" if failure is None else failure.error)
        return failure


def _load_and_serve(
    config: Config,
    seat: Seat | None,
    share: HostShare,
    sockets: CoreSockets,
    phases: PhaseClock,
    record: FlightRecord,
    start_ranks: Callable[[Path], AsyncIOProcManager],
) -> Failed | None:
    """See `_run`."""
    links = None if seat is None else _links(seat, sockets)
    try:
        has_ranks = config.parallel_config.tensor_parallel_size > 1
        loaded = load_model(config, phases, start_ranks if has_ranks else None, links, share)
        core = _core(loaded, sockets, record, links)
        core.produce_token()
        if links is not None:
            links.forget_place()
    except MeetingError as error:
        return Failed(str(error), usage=not error.is_over, collateral=error.is_over)
    except (ValueError, MemoryError, RankError) as error:
        logger.debug("start-up failed", exc_info=True)
        return Failed(str(error) or "memory ran out while the model was loaded; use a smaller one", usage=True)
    except PeerGoneError as error:
        return Failed(str(error), collateral=True)
    except Exception as error:
        logger.exception("start-up failed")
        gone = None if links is None else links.wait_gone(PEER_END_SECONDS)
        if gone is not None:
            return Failed(str(PeerGoneError(gone)), collateral=True)
        return Failed(f"the engine core could not start: {type(error).__name__}: {error}")
    # What is loaded stays: a full collection would walk all of torch's objects, and hold a step up, to find nothing.
    gc.freeze()
    phases.end("warm-up")
    sockets.serve_grammars(Matchers(loaded.load_tokenizer, loaded.info.vocab_size, loaded.info.eos_token_ids))
    sockets.output_queue.put(Ready(loaded.info, phases.seconds))
    try:
        core.busy_loop()
    except PeerGoneError as error:
        return Failed(str(error), collateral=True)
    except BaseException as error:
        logger.exception("the busy loop ended")
        return Failed(f"the engine core failed: {type(error).__name__}: {error}")
    return None


def _links(seat: Seat, sockets: CoreSockets) -> ReplicaLinks:
    """Between this core and those of the other replicas in lockstep."""

    def end(replica: int) -> None:
        _fail(sockets, str(PeerGoneError(replica)), collateral=True)

    return ReplicaLinks(seat, lambda number: sockets.input_queue.put(Wake(number)), end)


def _core(loaded: LoadedModel, sockets: CoreSockets, record: FlightRecord, links: ReplicaLinks | None) -> EngineCore:
    """The loop over a loaded model."""
    runner, queues = loaded.runner, (sockets.input_queue, sockets.output_queue)
    options: dict[str, Any] = {
        "window": loaded.window,
        "blocks_at_first": loaded.blocks_at_first,
        "prepare_ahead": runner.prepare_ahead,
        "record": record,
    }
    if links is None:
        return EngineCore(loaded.config, runner, *queues, **options)
    from engine.dp_engine_core import DPEngineCoreProc, Lockstep

    assert loaded.world is not None
    return DPEngineCoreProc(loaded.config, runner, *queues, Lockstep(loaded.world, links), **options)


if __name__ == "__main__":
    main()
