"""Whether a model's adapters may be part of captured graphs, where all are one product. Asked by the model runner."""

from typing import cast

from torch import nn

from models.base import CausalLM
from models.layers.mla import MLAAttention
from models.lora.layer import LinearLoRA

MAX_RANKS = 512
"""Of all adapters together in a layer: a graph's step multiplies by those of adapters that no row uses, too."""


def why_not_captured(model: CausalLM) -> str | None:
    """What keeps decodes with adapters out of graphs, in words; None: nothing."""
    for module in cast(nn.Module, model).modules():
        if isinstance(module, MLAAttention) and module.kv_b_proj.lora is not None:
            return "an adapter changes what expands latents, so that its rows attend twice"
        lora = getattr(module, "lora", None)
        if isinstance(lora, LinearLoRA) and lora.num_ranks > MAX_RANKS:
            return f"the adapters have {lora.num_ranks} ranks together, and a graph takes {MAX_RANKS}"
    return None
