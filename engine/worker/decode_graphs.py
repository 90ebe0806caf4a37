"""`DecodeGraphs`: the graphs of a model's decodes, and of those that verify drafts. Owned by the model runner."""

import torch

from engine.worker.device_batch import DeviceInputs
from engine.worker.graph_runner import GraphRunner
from engine.worker.input_batch import RowsAlike, StepInputs


class DecodeGraphs:
    """A `GraphRunner` for each number of tokens in a row; all as one."""

    def __init__(self, plain: GraphRunner, of_drafts: GraphRunner | None = None) -> None:
        """`of_drafts`: whose rows have one token, and as many drafts as may be verified with it."""
        self._runners = {each.query_len: each for each in (plain, of_drafts) if each is not None}
        self._plain = plain
        self.alike = None if of_drafts is None else RowsAlike(of_drafts.query_len, of_drafts.spare_slot)
        """What rows are to be where one verifies drafts; None: none does."""

    @property
    def captured_sizes(self) -> list[int]:
        """Batch sizes of plain decodes that are replayed, smallest first."""
        return self._plain.captured_sizes

    def size_for(self, inputs: StepInputs) -> int:
        """Rows of the graph that replays a step; 0 where it runs eagerly."""
        runner = self._runners.get(inputs.query_len)
        return 0 if runner is None else runner.size_for(inputs)

    def pad(self, inputs: StepInputs, size: int) -> StepInputs:
        """A step as a graph of `size` rows is to see it. 0: as it is."""
        return self._runners[inputs.query_len].pad(inputs, size) if size else inputs

    def run(self, step: DeviceInputs, num_tokens: int) -> torch.Tensor:
        """Replay a padded step, of which so many tokens are somebody's. # -> [num_tokens, H]

        The next replay overwrites what is returned.
        """
        return self._runners[step.metadata.query_len].run(step, num_tokens)

    def count_step(self) -> None:
        """Capture a further size once in a while, behind live traffic: those of plain decodes first."""
        self._unfinished.count_step()
        self._settle()

    def capture_next(self) -> bool:
        """Capture the next size that was not tried yet; whether there are more. What fails leaves steps eager."""
        self._unfinished.capture_next()
        self._settle()
        return self._unfinished.has_pending

    def _settle(self) -> None:
        """A device that holds no graph of plain decodes, or none that is right, is not asked for others."""
        if not self._plain.has_pending and not self._plain.captured_sizes:
            for runner in self._runners.values():
                runner.give_up()

    @property
    def _unfinished(self) -> GraphRunner:
        """The first that has sizes to capture, or the last."""
        runners = list(self._runners.values())
        return next((runner for runner in runners if runner.has_pending), runners[-1])
