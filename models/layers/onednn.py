"""Products' weights as oneDNN, which torch has within it, reads them: for hosts without the compiled operators.

Called by the loader once a model is filled. A packed weight takes the plain one's place, so each is stored once.
"""

import logging

import torch
from torch import nn

from models.layers.embedding import VocabParallelEmbedding

_log = logging.getLogger(__name__)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch on this processor multiplies packed weights of a type."""
    return (
        dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_filled_products(model: nn.Module) -> None:
    """Pack every bfloat16 weight that is one product's alone: none that is also read row by row, or one of a stack."""
    read_by_row = {id(module.weight) for module in model.modules() if type(module) is VocabParallelEmbedding}
    for parameter in model.parameters():
        if parameter.dim() == 2 and getattr(parameter, "is_product", False) and id(parameter) not in read_by_row:
            weight = parameter.data
            # The number of rows is a hint.
            parameter.onednn = torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # type: ignore[attr-defined]
            # Whoever reads it in another way finds no numbers.
            parameter.data = torch.full((1,), torch.nan, dtype=weight.dtype).expand(weight.shape)
    _log.info("Products run on weights that oneDNN packs")
