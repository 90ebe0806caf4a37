"""Multi-token prediction (MTP): drafters that are decoder layers in the target's own checkpoint.

An MTP layer fuses the target's final hidden state of a token with the embedding of the next token, both normalised,
and runs one decoder layer of the target's kind on the result (DeepSeek-V3, 2024, section 2.2). Published checkpoints
contain one such layer, which drafts further tokens from its own output. If there are several, the first one is used.
"""

import dataclasses
from typing import ClassVar, cast

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.deepseek_v2 import DeepseekV2ForCausalLM
from models.architectures.deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4ForCausalLM,
    compress_rope,
    further_layer,
)
from models.architectures.draft_head import DraftHead, TargetWeights
from models.architectures.glm4_moe import Glm4MoeForCausalLM
from models.architectures.llama import LlamaDecoderLayer, LlamaForCausalLM
from models.architectures.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from models.architectures.qwen3_next import Qwen3NextForCausalLM
from models.layers.base import CacheSpec
from models.layers.compressed import CompressedAttention
from models.layers.hyper_connection import HyperHead, projected, repeated
from models.layers.linear import ColumnParallelLinear, ParallelLMHead, VocabParallelEmbedding
from models.layers.norm import OffsetRMSNorm, RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.ops.columns import join_columns
from models.ops.norm import add_rows
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


class SharedHead(nn.Module):
    """The final norm, and the head if the MTP layer has its own."""

    def __init__(self, config: ModelConfig, *, has_head: bool, parallel: TensorParallel) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, parallel)
        if has_head:
            self.head = ParallelLMHead(config.vocab_size, config.hidden_size, parallel=parallel)


class NextTokenLayer(LlamaDecoderLayer):
    """The layer after the target's last one, with the modules that fuse its input."""

    def __init__(
        self,
        config: ModelConfig,
        architecture: type[LlamaForCausalLM],
        target: TargetWeights,
        parallel: TensorParallel,
    ) -> None:
        number = config.num_hidden_layers
        further = dataclasses.replace(config, sliding_windows=(*config.sliding_windows, None))
        super().__init__(further, number, architecture.attention, architecture.feed_forward, parallel)
        size, eps = config.hidden_size, config.rms_norm_eps
        if target.embed_tokens is None:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, parallel=parallel)
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = ColumnParallelLinear(2 * size, size)
        self.shared_head = SharedHead(config, has_head=target.lm_head is None, parallel=parallel)


class NextTokenModel(nn.Module):
    """Holds the layer under its index, so that its parameters have the checkpoint's names."""

    def __init__(self, number: int, layer: NextTokenLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer})


class LayeredMTP(DraftHead):
    """The layer `model.layers.N` of a checkpoint, N being the target's number of layers."""

    architecture: ClassVar[type[LlamaForCausalLM]]
    """The target's architecture, whose attention and feed-forward layers are used."""

    def __init__(self, config: ModelConfig, target: TargetWeights, parallel: TensorParallel = SINGLE_RANK) -> None:
        layer = NextTokenLayer(config, self.architecture, target, parallel)
        super().__init__(config, target.embed_tokens or layer.embed_tokens, target.lm_head or layer.shared_head.head)
        self.number = str(config.num_hidden_layers)
        self.model = NextTokenModel(config.num_hidden_layers, layer)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`. The result is normalised, like the target's final hidden states."""
        layer = cast(NextTokenLayer, self.model.layers[self.number])
        cos, sin = self.rotary_emb(positions)
        fused = layer.eh_proj(join_columns(layer.enorm(self.embed_tokens(input_ids)), layer.hnorm(hidden)))
        return layer.shared_head.norm.add_norm(*layer(fused, None, cos, sin))[0]


class DeepseekMTP(LayeredMTP):
    """MTP layer of DeepSeek-V3 and V3.2, GLM-4.7-Flash and GLM-5."""

    architecture = DeepseekV2ForCausalLM


class Glm4MoeMTP(LayeredMTP):
    """MTP layer of GLM-4.5 and its successors."""

    architecture = Glm4MoeForCausalLM


class Qwen3NextPredictor(nn.Module):
    """A decoder layer of full attention, with the modules that fuse its input."""

    def __init__(
        self, config: ModelConfig, architecture: type[Qwen3NextForCausalLM], parallel: TensorParallel
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = ColumnParallelLinear(2 * size, size)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = OffsetRMSNorm(size, eps), OffsetRMSNorm(size, eps)
        self.layers = nn.ModuleList([architecture.decoder_layer(config, config.num_hidden_layers, parallel)])
        self.norm = OffsetRMSNorm(size, eps)


class Qwen3NextMTP(DraftHead):
    """The tensors `mtp.*` of Qwen3-Next, which have neither embedding nor head."""

    architecture: ClassVar[type[Qwen3NextForCausalLM]] = Qwen3NextForCausalLM
    """The target's architecture, whose decoder layers are used."""

    def __init__(self, config: ModelConfig, target: TargetWeights, parallel: TensorParallel = SINGLE_RANK) -> None:
        embedding, head = target
        assert embedding is not None, "the checkpoint has no other"
        assert head is not None, "the checkpoint has no other"
        super().__init__(config, embedding, head)
        self.mtp = Qwen3NextPredictor(config, self.architecture, parallel)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`. The result is normalised, like the target's final hidden states."""
        mtp = self.mtp
        embedded = mtp.pre_fc_norm_embedding(self.embed_tokens(input_ids))
        cos, sin = self.rotary_emb(positions)
        fused = mtp.fc(join_columns(embedded, mtp.pre_fc_norm_hidden(hidden)))
        return mtp.norm.add_norm(*mtp.layers[0](fused, None, cos, sin))[0]


class Qwen3_5MTP(Qwen3NextMTP):
    """MTP layer of Qwen3.5."""

    architecture = Qwen3_5ForCausalLM


class Qwen3_5MoeMTP(Qwen3NextMTP):
    """MTP layer of Qwen3.5 with experts."""

    architecture = Qwen3_5MoeForCausalLM


class DeepseekV4Predictor(DeepseekV4DecoderLayer):
    """A decoder layer with the modules that fuse its input streams and that combine the streams before the head."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, parallel: TensorParallel) -> None:
        super().__init__(further_layer(config), config.num_hidden_layers, rotary, parallel)
        size, eps, fields = config.hidden_size, config.rms_norm_eps, config.fields
        self.enorm, self.hnorm, self.norm = RMSNorm(size, eps), RMSNorm(size, eps), RMSNorm(size, eps)
        self.e_proj, self.h_proj = ColumnParallelLinear(size, size), ColumnParallelLinear(size, size)
        self.hc_head = HyperHead(size, fields.integer("hc_mult"), fields.number("hc_eps"), eps)


class DeepseekV4MTP(DraftHead):
    """The tensors `mtp.0.*` of DeepSeek-V4. The layer reads and returns all residual streams.

    An output also has what the head reads, the normalised sum of the streams, so that the head is a single product.
    Embedding and head are the target's, as in DeepSeek's own code; copies in the checkpoint are not loaded.
    """

    packed_modules_mapping = DeepseekV4ForCausalLM.packed_modules_mapping

    def __init__(self, config: ModelConfig, target: TargetWeights, parallel: TensorParallel = SINGLE_RANK) -> None:
        embedding, head = target
        assert embedding is not None, "the target's is used"
        assert head is not None, "the target's is used"
        super().__init__(config, embedding, head)
        count = config.fields.integer("hc_mult")
        self.count, self.size, self.hidden_size = count, config.hidden_size, (1 + count) * config.hidden_size
        self.hidden_layers = tuple(range(config.num_hidden_layers, config.num_hidden_layers + count))
        self.compress_rotary_emb = RotaryEmbedding(compress_rope(config), config.max_model_len)
        self.mtp = nn.ModuleList([DeepseekV4Predictor(config, self.compress_rotary_emb, parallel)])

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`. # [tokens, hc_mult * size], or an output -> [tokens, (1 + hc_mult) * size]"""
        layer, num_tokens = cast(DeepseekV4Predictor, self.mtp[0]), len(input_ids)
        streams = hidden[:, hidden.shape[1] - self.count * self.size :].view(num_tokens, self.count, self.size)
        embedded = repeated(layer.e_proj(layer.enorm(self.embed_tokens(input_ids))), self.count)
        fused = projected(layer.hnorm(streams), layer.h_proj).view(num_tokens, -1)
        streams = add_rows(fused, embedded.view(num_tokens, -1)).view(streams.shape)
        rotary = self.compress_rotary_emb if layer.is_compressed else self.rotary_emb
        streams = layer(streams, input_ids, rotary(positions))
        return join_columns(layer.norm(layer.hc_head(streams)), streams.view(num_tokens, -1))

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`. The target has no sum of the streams that `forward` would read."""
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`."""
        return self.lm_head(hidden[:, : self.size])  # type: ignore[no-any-return]

    def kv_cache_layers(self) -> list[CacheSpec]:
        """See `DraftLM`."""
        layers = [module for module in self.modules() if isinstance(module, CompressedAttention)]
        return [spec for layer in layers for spec in layer.cache_specs]


MTP_OF: dict[str, type[LayeredMTP | Qwen3NextMTP | DeepseekV4MTP]] = {
    "DeepseekV3ForCausalLM": DeepseekMTP,
    "DeepseekV32ForCausalLM": DeepseekMTP,
    "DeepseekV4ForCausalLM": DeepseekV4MTP,
    "Glm4MoeForCausalLM": Glm4MoeMTP,
    "Glm4MoeLiteForCausalLM": DeepseekMTP,
    "GlmMoeDsaForCausalLM": DeepseekMTP,
    "Qwen3NextForCausalLM": Qwen3NextMTP,
    "Qwen3_5ForCausalLM": Qwen3_5MTP,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeMTP,
}
"""The MTP drafter of each target architecture."""
