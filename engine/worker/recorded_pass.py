"""`record_pass`: the model's pass on a CPU as one call of the compiled operators. Used by the model runner."""

import numpy as np
import torch

from models.attention.base import AttentionBackend
from models.base import CausalLM
from models.forward_context import Context, DPMetadata, forward_context
from models.kernels.cpu.library import Library
from models.kernels.cpu.program import Program, record


def record_pass(
    operators: Library,
    model: CausalLM,
    backend: AttentionBackend,
    num_tokens: int,
    dp_metadata: DPMetadata | None,
) -> Program:
    """Of up to so many tokens. What it needs for the largest step takes memory as far as steps have used it.

    Raises `NotRecordable`.
    """
    none = np.zeros(0, dtype=np.int64)
    metadata = backend.build_metadata(
        query_lens=none, seq_lens=none, block_tables=np.zeros((0, 1), np.int32), slot_mapping=none, num_decodes=0
    )

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = Context(positions=positions, is_prefill=False, batch_size=0)
        with forward_context(metadata, context, dp_metadata):
            return model(input_ids, positions)

    return record(operators, forward, num_tokens)
