"""Token-level stop conditions (specification §5.3); text-level stop strings are the front end's."""

from collections.abc import Collection

from engine.sequence import Sequence


class StopConditions:
    """Decides why a sequence ends at the token it was just given.

    `token_limit` bounds a sequence's length whatever it asked for: the context, or the cache where that is smaller.
    """

    def __init__(self, eos_token_id: int | None, stop_token_ids: Collection[int], token_limit: int | None) -> None:
        self.eos_token_id = eos_token_id
        self.stop_token_ids = frozenset(stop_token_ids)
        self.token_limit = token_limit

    def prepare(self, seq: Sequence) -> None:
        """Note on a new sequence what can end it: `seq.end_tokens`, and its length in tokens, `seq.token_limit`."""
        model_tokens = () if seq.ignore_eos else (self.eos_token_id, *self.stop_token_ids)
        seq.end_tokens = frozenset((*model_tokens, *(seq.sampling_params.stop_token_ids or ())))
        seq.token_limit = seq.num_prompt_tokens + seq.max_tokens
        if self.token_limit is not None:
            seq.token_limit = min(seq.token_limit, self.token_limit)

    def leave_reason(self, seq: Sequence, token_id: int) -> str | None:
        """Why `seq` ends at `token_id`, its latest token; None: it goes on. First match in the order of the spec.

        `ignore_eos` ignores the model's whole EOS list, of which `stop_token_ids` is the rest, but not the stop
        tokens and sequences that the request itself names.
        """
        if not seq.token_limit:
            self.prepare(seq)
        if seq.stop_token_sequences and self._ends_with_stop_sequence(seq):
            return "stop_sequence"
        if not seq.ignore_eos:
            if token_id == self.eos_token_id:
                return "eos"
            if token_id in self.stop_token_ids:
                return f"stop_{token_id}"
        own = seq.sampling_params.stop_token_ids
        if own and token_id in own:
            return f"stop_{token_id}"
        if seq.matcher is not None and seq.matcher.is_complete:
            return "grammar"
        if len(seq.token_ids) >= seq.token_limit:
            return "max_tokens"
        return None

    @staticmethod
    def _ends_with_stop_sequence(seq: Sequence) -> bool:
        """Whether the completion (a stop sequence never reaches into the prompt) ends with one of them."""
        generated = len(seq.token_ids) - seq.num_prompt_tokens
        if generated < seq.sampling_params.min_tokens:
            return False
        return any(
            0 < len(stop) <= generated and seq.token_ids[-len(stop) :] == stop for stop in seq.stop_token_sequences
        )
