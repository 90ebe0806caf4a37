"""`PromptPooler`: pools a step's hidden states into the vectors of the prompts that the step completes; and the inputs
of encoders.

Owned by the model runner. For a prompt that is computed in several steps, it holds the partial result between them.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ScheduledBatchOutput
from engine.runner.input_batch import PooledSpan, StepInputs
from models.architectures.pooling import Function, Mode, PoolingConfig
from models.attention.context import EncoderPrompts
from models.layers.pooling import PoolingHead

_SMALLEST_NORM = 1e-12
"""The least norm by which a vector is divided, as in torch.nn.functional.normalize."""


class PooledVectors(NamedTuple):
    """The vectors of the prompts that a step completes, before the model's last function."""

    spans: list[PooledSpan]
    values: torch.Tensor  # [spans, features] float32, on the device
    function: Function
    dtype: torch.dtype
    """The model's."""

    def add_to(self, output: ScheduledBatchOutput, seq_ids: Sequence[int], values: torch.Tensor) -> None:
        """Add the vectors to a step's output, or an error for one with NaN or inf.

        `seq_ids`: the sequences of the step's rows. `values`: those of this object on the host.
        """
        output.vectors = {}
        for span, row in zip(self.spans, values.numpy(), strict=True):
            seq_id, wanted = seq_ids[span.row], span.params
            if np.isfinite(row).all():
                vector = _FUNCTIONS[self.function if wanted.activate else "none"](row[: wanted.dimensions])
                output.vectors[seq_id] = vector.astype("<f4", copy=False).tobytes()
                continue
            output.errors = output.errors or {}
            output.errors[seq_id] = (
                f"the model's vector is not finite: the checkpoint is damaged, or its values overflow {self.dtype} "
                "and need another dtype"
            )


class PromptPooler:
    """Pools prompts by the modes of the model's checkpoint."""

    def __init__(self, pooling: PoolingConfig, head: PoolingHead, dtype: torch.dtype) -> None:
        """`dtype`: the model's, which errors name."""
        self._pooling, self._head, self._dtype = pooling, head, dtype
        self._begun: dict[tuple[int, Mode], torch.Tensor] = {}
        """Partial results of prompts that are not complete yet, by slot and mode."""

    def pool(self, hidden: torch.Tensor, spans: Sequence[PooledSpan]) -> PooledVectors | None:
        """Pool a step's spans. Returns the vectors of spans that complete their prompts, None where none does.

        # hidden [T, H]
        """
        ended: list[PooledSpan] = []
        pooled: list[torch.Tensor] = []
        for span in spans:
            parts = [self._part(mode, hidden[span.first : span.end], span) for mode in self._pooling.modes]
            if span.is_last:
                ended.append(span)
                pooled.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        if not ended:
            return None
        return PooledVectors(ended, self._head(torch.stack(pooled)), self._pooling.function, self._dtype)

    def _part(self, mode: Mode, states: torch.Tensor, span: PooledSpan) -> torch.Tensor:
        """The vector of one mode over all tokens up to the span's end. # [n, H] -> [H] float32"""
        if mode == "last":
            return states[-1].float()
        begun = self._begun.pop((span.slot, mode), None) if span.position else None
        if mode == "cls":
            part = states[0].float() if begun is None else begun
        elif mode == "max":
            part = states.float().amax(0)
            part = part if begun is None else torch.maximum(begun, part)
        else:
            # Double precision makes the result independent of how the prompt was split into chunks.
            part = states.double().sum(0)
            part = part if begun is None else begun + part
        if not span.is_last:
            self._begun[span.slot, mode] = part
        elif mode == "mean":
            part = (part / (span.position + len(states))).float()
        return part


def encoder_prompts(inputs: StepInputs, device: torch.device) -> EncoderPrompts:
    """The inputs of an encoder for a step's prompts, each of which is computed whole."""
    lengths = inputs.query_lens.tolist()
    if all(span.params.first_text_tokens is None for span in inputs.pooled):
        return EncoderPrompts(lengths)
    is_second = np.zeros(len(inputs.input_ids), dtype=np.int64)
    for span in inputs.pooled:
        if span.params.first_text_tokens is not None:
            is_second[span.first + span.params.first_text_tokens : span.end] = 1
    return EncoderPrompts(lengths, torch.from_numpy(is_second).to(device))


def _normalize(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    wide = vector.astype(np.float64)
    return (wide / max(float(np.linalg.norm(wide)), _SMALLEST_NORM)).astype(np.float32)


def _sigmoid(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    # The form by tanh overflows for no argument, unlike 1 / (1 + exp(-x)).
    scores: npt.NDArray[np.float32] = (0.5 * (1.0 + np.tanh(0.5 * vector.astype(np.float64)))).astype(np.float32)
    return scores


def _softmax(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    powers = np.exp(vector.astype(np.float64) - vector.max())
    scores: npt.NDArray[np.float32] = (powers / powers.sum()).astype(np.float32)
    return scores


_FUNCTIONS: Mapping[Function, Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]] = MappingProxyType(
    {"none": lambda vector: vector, "normalize": _normalize, "sigmoid": _sigmoid, "softmax": _softmax}
)
