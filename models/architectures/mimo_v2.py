"""MiMo-V2: values have fewer dimensions than keys; most layers have a window, sinks and twice the key heads;
experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.glm4_moe import corrected_experts
from models.architectures.gpt_oss import GptOssAttention
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaModel
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.config.rope import parse_rope
from models.ops.scale import scale
from models.parallel.tensor_parallel import TensorParallel

_LOCAL, _FULL = "sliding_attention", "full_attention"
_SHARE = 0.334
_THETAS = {_FULL: 5e6, _LOCAL: 1e4}


class MiMoV2Attention(GptOssAttention):
    """Grouped-query attention with scaled values of fewer dimensions than keys; windowed layers have sinks."""

    has_output_bias: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        is_local = config.sliding_windows[layer] is not None
        kv_heads = config.num_key_value_heads * (2 if is_local else 1)
        if config.num_attention_heads % kv_heads:
            raise config.fields.invalid("num_attention_heads", f"a multiple of the {kv_heads} key heads of a layer")
        super().__init__(replace(config, num_key_value_heads=kv_heads), layer, parallel)
        if not is_local:
            self.sinks = None
        self.value_scale = config.fields.number("attention_value_scale", 0.707)

    @staticmethod
    def size_of_values(config: ModelConfig) -> int:
        """Elements of a head's value."""
        return config.fields.integer("v_head_dim")

    def gated(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the factor of values to the output, which is equivalent. # [tokens, heads, value_dim], ... -> same"""
        del hidden
        return scale(attended.view(len(attended), -1), self.value_scale)


def _windowed(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Whether each layer has a window: all but the first layer and every sixth."""
    del fields
    return [layer > 0 and (layer + 1) % 6 != 0 for layer in range(num_layers)]


def _complete(fields: Fields) -> Fields:
    """Add kinds of layers, windows and ropes with transformers' names; published configs have others."""
    values: dict[str, Any] = dict(fields.values)
    num_layers = fields.integer("num_hidden_layers")
    if not fields.has("mlp_layer_types"):
        values["mlp_layer_types"] = ["dense"] + ["sparse"] * (num_layers - 1)
    if fields.has("sliding_window_size"):
        # This field does not count the query's token.
        values["sliding_window"] = fields.integer("sliding_window_size") + 1
    # An explicit null means 1; a missing field means its default.
    for name in ("attention_value_scale", "routed_scaling_factor"):
        if name in fields.values and not fields.has(name):
            values[name] = 1.0
    ropes = fields.section("rope_parameters")
    if ropes is not None and not all(ropes.has(kind) for kind in _THETAS):
        raise fields.invalid("rope_parameters", f"an object with a rope for each of {', '.join(_THETAS)}")
    kinds = {}
    for kind, theta in _THETAS.items():
        own = None if ropes is None else ropes.section(kind)
        kinds[kind] = {"rope_theta": theta, "partial_rotary_factor": _SHARE, **({} if own is None else own.values)}
    values["rope_parameters"] = kinds
    values.pop("partial_rotary_factor", None)
    return Fields(values, fields.where)


_FACTS = ConfigFacts(
    defaults={
        "head_dim": 192,
        "n_group": 1,
        "n_shared_experts": 0,
        "rms_norm_eps": 1e-5,
        "sliding_window": 129,
        "topk_group": 1,
        "v_head_dim": 128,
    },
    complete=_complete,
    rotates_parts=True,
    renamed={"num_local_experts": "n_routed_experts"},
    windowed_layers=_windowed,
    names={"attention_sink_bias": "sinks"},
)


@architecture("MiMoV2FlashForCausalLM", _FACTS)
class MiMoV2ForCausalLM(LlamaForCausalLM):
    """MiMo-V2 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = MiMoV2Attention

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        ropes = config.fields.section("rope_parameters")
        assert ropes is not None, "both kinds have theirs"
        local = parse_rope(
            config.fields,
            head_dim=config.head_dim,
            max_position_embeddings=config.fields.integer("max_position_embeddings"),
            parameters=ropes.section(_LOCAL),
        )
        return LlamaModel(config, self.attention, self.feed_forward, parallel, local_rope=local)

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A dense network in the first layer, experts in the others."""
        return corrected_experts(config, layer, parallel)
