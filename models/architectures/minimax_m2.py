"""MiniMax-M2: experts in every layer, partial rotation, and norms over all query and all key heads of a token."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaForCausalLM
from models.architectures.olmo import HeadsNormAttention
from models.architectures.registry import ConfigFacts, architecture
from models.layers.moe import ExpertNames, FusedMoE, SparseMoE
from models.layers.routing import GroupedRouter, experts_per_token
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 5e6}


_FACTS = ConfigFacts(
    defaults=_DEFAULTS,
    renamed={"num_experts": "num_local_experts"},
    rotates_parts=True,
    has_rotary_dim=True,
    bias_field="",
)


@architecture("MiniMaxM2ForCausalLM", _FACTS)
class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """MiniMax-M2 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = HeadsNormAttention
    checkpoint_modules: ClassVar[dict[str, str]] = {"mlp": "block_sparse_moe"}
    """Module of the model -> its name in checkpoints."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        fields = config.fields
        for name, wanted in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
            if fields.string(name, wanted) != wanted:
                raise fields.invalid(name, f'"{wanted}"')
        for name in ("use_qk_norm", "use_routing_bias"):
            if not fields.boolean(name, True):
                raise fields.invalid(name, "true")
        if fields.integer("shared_intermediate_size", 0, minimum=0):
            raise fields.invalid("shared_intermediate_size", "0: shared experts are not implemented")
        super().__init__(config, parallel)

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A mixture of experts in every layer."""
        del layer
        num_experts = config.fields.integer("num_local_experts")
        gate = GroupedRouter(
            config.hidden_size,
            num_experts,
            experts_per_token(config.fields, num_experts),
            renormalize=True,
            correction_name="e_score_correction_bias",
        )
        names = ExpertNames(gate="w1", up="w3", down="w2")
        experts = FusedMoE(
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            activation=gated_activation(config.activation),
            names=names,
            parallel=parallel,
        )
        return SparseMoE(gate, experts)
