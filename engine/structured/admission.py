"""`GrammarAdmission`: gives sequences their matchers before they are queued. Owned by the engine core's input thread.

Compiling happens in a thread of its own, so that neither the busy loop nor any other request waits for it.
"""

import logging
import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue

from engine.sequence import Sequence
from engine.structured.matchers import Matchers
from engine.structured.spec import InvalidGrammar

logger = logging.getLogger(__name__)

_STACK_BYTES = 64 * 2**20
"""Far more than the process has that checks grammars for the front end: what passed there cannot overflow here."""


class GrammarAdmission:
    """Between the input thread and the input queue, for the sequences that have a grammar."""

    def __init__(
        self,
        matchers: Matchers,
        admit: Callable[[Sequence], object],
        refuse: Callable[[Sequence, str, bool], object],
    ) -> None:
        """`admit` takes sequences that can run; `refuse` the others: why, and whether the request is at fault."""
        self._matchers = matchers
        self._admit = admit
        self._refuse = refuse
        self._jobs: SimpleQueue[Sequence] = SimpleQueue()
        self._pending: dict[int, Sequence] = {}
        self._lock = threading.Lock()
        previous = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(previous)

    def add(self, seq: Sequence) -> None:
        """Admit a sequence with a grammar: at once if that is compiled, else as soon as it is."""
        assert seq.sampling_params.grammar is not None
        seq.matcher = self._matchers.cached(seq.sampling_params.grammar)
        if seq.matcher is not None:
            refusal = _catch_up(seq)
            if refusal is None:
                self._admit(seq)
            else:
                self._refuse(seq, refusal, False)
            return
        with self._lock:
            self._pending[seq.id] = seq
        self._jobs.put(seq)

    def take_back(self, seq_ids: Collection[int]) -> list[int]:
        """Give up those of these sequences that are not admitted yet; their ids."""
        with self._lock:
            return [seq_id for seq_id in seq_ids if self._pending.pop(seq_id, None) is not None]

    def _work(self) -> None:
        self._matchers.load()
        while True:
            seq = self._jobs.get()
            if seq.id not in self._pending:
                continue
            refusal = self._prepare(seq)
            # Under the lock, so that an abort either finds the sequence here or follows it into the queue.
            with self._lock:
                if self._pending.pop(seq.id, None) is None:
                    continue
                if refusal is None:
                    self._admit(seq)
                else:
                    self._refuse(seq, *refusal)

    def _prepare(self, seq: Sequence) -> tuple[str, bool] | None:
        """Give `seq` its matcher; or why it can have none, and whether the request is at fault."""
        assert seq.sampling_params.grammar is not None
        try:
            seq.matcher = self._matchers.matcher(seq.sampling_params.grammar)
        except InvalidGrammar as error:
            return str(error), True
        except BaseException as error:  # a panic of the native library is no `Exception`, and must end no thread
            logger.exception("a grammar cannot be compiled")
            return f"the grammar of this request cannot be compiled: {error}", False
        refusal = _catch_up(seq)
        return None if refusal is None else (refusal, False)


def _catch_up(seq: Sequence) -> str | None:
    """Follow the grammar along what a resumed sequence has generated; why that cannot be, if it cannot."""
    assert seq.matcher is not None
    for token_id in seq.completion_token_ids:
        if not seq.matcher.accept(token_id):
            return seq.matcher.error
    return None
