"""`probe`: whether a model of transformers computes in a server's steps what it computes alone. Run once at loading.

What the calls of its attention do not show would show here: a state that runs from token to token, a convolution, a
position counted from the start of a step.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from models.attention import select_backend
from models.base import KVCacheSpec, VectorCacheSpec
from models.errors import CheckpointError
from models.forward_context import Context, forward_context, get_forward_context
from models.kernels.types import KVCacheTensor, LayerCache, VectorCache
from models.transformers_config import TransformersConfig

if TYPE_CHECKING:
    from models.transformers_model import TransformersModel

_BLOCK_SIZE = 16
_LENGTHS = (9, 5)
"""Tokens of the two sequences, one block each."""
_STEPS = (((0, 0, 5), (1, 0, 4)), ((1, 4, 5), (0, 5, 9)))
"""By step, the spans (sequence, start, end) that it computes: two prompts, then a decode beside a chunk."""
_TOLERANCE = {torch.float32: 1e-4}
_COARSE_TOLERANCE = 0.1
"""Error of logits relative to their size; what is computed wrong errs by about 1."""


def probe(model: "TransformersModel", config: TransformersConfig, *, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `CheckpointError` where two sequences in two steps give other logits than alone."""
    sequences = [(torch.arange(length) * 7 + index) % config.vocab_size for index, length in enumerate(_LENGTHS)]
    sequences = [tokens.to(device) for tokens in sequences]
    with torch.inference_mode():
        paged = _in_steps(model, sequences, dtype, device)
        for found, tokens in zip(paged, sequences, strict=True):
            alone = model.reference_logits(tokens)
            error = (found - alone).norm() / (alone - alone.mean(-1, keepdim=True)).norm()
            # A NaN is not at most anything.
            if not error <= _TOLERANCE.get(dtype, _COARSE_TOLERANCE):
                raise CheckpointError(
                    f"{config.architecture} gives other logits in a batch than alone (by {float(error):.1%}): it "
                    "computes more across tokens than causal attention, such as a recurrent state or a convolution, "
                    "which the general route cannot serve"
                )


def _in_steps(
    model: "TransformersModel", sequences: list[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Logits of both sequences. # each [n, vocab_size]"""
    backend = select_backend(device)
    caches: dict[str, LayerCache] = {}
    for spec in model.kv_cache_layers():
        if isinstance(spec, VectorCacheSpec):
            vectors = torch.zeros(len(sequences), _BLOCK_SIZE, spec.dim, dtype=dtype, device=device)
            caches[spec.name] = VectorCache(vectors)
            continue
        assert isinstance(spec, KVCacheSpec)
        shape = backend.kv_cache_shape(len(sequences), _BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        caches[spec.name] = KVCacheTensor(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for spans in _STEPS:
        positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
        counts = [end - start for _, start, end in spans]
        num_decodes = int(counts[0] == 1)
        metadata = backend.build_metadata(
            query_lens=counts,
            seq_lens=[end for _, _, end in spans],
            block_tables=np.array([[sequence] for sequence, _, _ in spans], dtype=np.int32),
            slot_mapping=np.concatenate(
                [np.arange(start, end) + sequence * _BLOCK_SIZE for sequence, start, end in spans]
            ),
            num_decodes=num_decodes,
        )
        at = torch.from_numpy(positions).to(device)
        context = Context(positions=at, is_prefill=True, batch_size=len(spans))
        with forward_context(metadata, context):
            get_forward_context().kv_cache_data = dict(caches)
            hidden = model(torch.cat([sequences[sequence][start:end] for sequence, start, end in spans]), at)
        for (sequence, _, _), logits in zip(spans, torch.split(model.compute_logits(hidden), counts), strict=True):
            parts[sequence].append(logits)
    return [torch.cat(part) for part in parts]
