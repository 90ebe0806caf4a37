"""Llama: pre-norm decoder layers of rotary grouped-query attention and SwiGLU. Other families build on it."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.registry import ConfigFacts, architecture
from models.attention.context import get_forward_context
from models.config.fields import Fields
from models.config.rope import RopeConfig
from models.layers.attention import Attention, EncoderAttention
from models.layers.base import CacheSpec
from models.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    PackedLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from models.layers.moe import leave_sum_open
from models.layers.norm import RMSNorm, round_for_reader
from models.layers.rotary import RotaryEmbedding
from models.ops.activation import ACTIVATIONS, GatedActivation, activate, gated_activation, gating_of
from models.ops.columns import join_columns
from models.ops.norm import add_rows
from models.ops.stored_weight import Feed
from models.ops.types import Gating, HeadNorms
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    has_output_bias: ClassVar[bool] = True
    """Whether the output projection has a bias if the other projections have one."""
    rotates_pairs: ClassVar[bool] = False
    """Whether the checkpoint's queries and keys are rotated as adjacent pairs of dimensions, not as halves."""
    is_rotated_first: ClassVar[bool] = False
    """Whether the norms of queries and keys follow the rotation."""
    is_chunked: ClassVar[bool] = False
    """Whether windows are chunks of positions."""
    is_grouped: ClassVar[bool] = False
    """Whether one tensor has the query heads of each KV head, then its key and its value."""
    num_inputs: ClassVar[int] = 1
    """Number of concatenated vectors of `hidden_size` that the projections read."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.head_dim, self.value_dim = config.head_dim, self.size_of_values(config)
        self.qkv_proj = QKVParallelLinear(
            self.num_inputs * config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            parallel=parallel,
            paired_dims=config.rope.rotary_dim if self.rotates_pairs else 0,
            value_dim=None if self.is_grouped else self.value_dim,
            is_grouped=self.is_grouped,
        )
        self.rotates = self.is_rotated(config, layer)
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.value_dim,
            config.hidden_size,
            bias=self.output_bias(config),
            parallel=parallel,
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.sinks: nn.Parameter | None = None
        scale, window = self.score_scale(config) or config.head_dim**-0.5, config.sliding_windows[layer]
        self.attn: Attention | EncoderAttention
        if config.is_bidirectional:
            # An encoder's window extends half its size before a token and half after it.
            self.attn = EncoderAttention(scale=scale, window=None if window is None else window // 2)
        else:
            self.attn = Attention(
                f"model.layers.{layer}.self_attn",
                num_kv_heads=self.num_kv_heads,
                head_dim=config.head_dim + self.num_extra_dims(config),
                value_dim=self.value_dim,
                scale=scale,
                sliding_window=window,
                soft_cap=self.score_cap(config),
                is_chunked=self.is_chunked and window is not None,
                is_rotated_first=self.is_rotated_first,
            )

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        num_tokens = len(hidden)
        qkv = self.projected(hidden)
        if self.value_dim == self.head_dim:
            qkv = qkv.view(num_tokens, -1, self.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
            parts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
            q, k, v = qkv.split(parts, dim=1)  # type: ignore[no-untyped-call]
        else:
            dims = (
                (self.num_heads, self.head_dim),
                (self.num_kv_heads, self.head_dim),
                (self.num_kv_heads, self.value_dim),
            )
            rows = qkv.split([heads * dim for heads, dim in dims], dim=1)  # type: ignore[no-untyped-call]
            q, k, v = (part.view(num_tokens, *of_heads) for part, of_heads in zip(rows, dims, strict=True))
        q, k = self.prepared(q, k)
        attended = self.attn(
            q,
            k,
            v,
            self.sinks,
            norms=self.head_norms(),
            rotation=(cos, sin) if self.rotates else None,
            q_scales=self.query_scales(),
        )
        return self.o_proj(self.gated(attended, hidden).view(num_tokens, -1))  # type: ignore[no-any-return]

    def follow(self, norm: RMSNorm) -> None:
        """See `ParallelLinear.follow`."""
        self.qkv_proj.follow(norm)

    @classmethod
    def output_bias(cls, config: ModelConfig) -> bool:
        """Whether the output projection has a bias."""
        return config.attention_bias and cls.has_output_bias

    @staticmethod
    def size_of_values(config: ModelConfig) -> int:
        """Elements of a head's value."""
        return config.head_dim

    @staticmethod
    def num_extra_dims(config: ModelConfig) -> int:
        """Elements that `prepared` adds to queries and keys."""
        del config
        return 0

    @staticmethod
    def is_rotated(config: ModelConfig, layer: int) -> bool:
        """Whether that layer's queries and keys are rotated."""
        del config, layer
        return True

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values. # [tokens, hidden_size] -> [tokens, features]"""
        return self.qkv_proj(hidden)  # type: ignore[no-any-return]

    def head_norms(self) -> HeadNorms | None:
        """The norms of queries and keys that all heads share, if there are any."""
        return None

    def prepared(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Transform queries and keys before attention. # [tokens, heads, head_dim] each"""
        return q, k

    def query_scales(self) -> torch.Tensor | None:
        """Factors of the step's queries after their rotation; None without factors. # [tokens, 1] float32"""
        return None

    def gated(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the output gate, if any; `hidden`: the layer's input. # [tokens, heads, head_dim] -> the same"""
        del hidden
        return attended

    @staticmethod
    def score_scale(config: ModelConfig) -> float | None:
        """The scale of the attention scores; None for `head_dim ** -0.5`."""
        del config
        return None

    @staticmethod
    def score_cap(config: ModelConfig) -> float | None:
        """The soft cap of the attention scores; None without a cap."""
        del config
        return None


class LlamaMLP(nn.Module):
    """Gated feed-forward layer, of the config's intermediate size or of its own."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: TensorParallel,
        *,
        intermediate_size: int | None = None,
        reduces: bool = True,
    ) -> None:
        """`reduces`: False if the caller reduces the partial sums over the ranks."""
        super().__init__()
        self.activation: GatedActivation = gated_activation(config.activation)
        size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_up_proj: PackedLinear = MergedColumnParallelLinear(
            config.hidden_size, [size] * 2, bias=config.mlp_bias, parallel=parallel
        )
        self.down_proj = RowParallelLinear(
            size, config.hidden_size, bias=config.mlp_bias, parallel=parallel, reduces=reduces
        )
        self.down_proj.feed = Feed(self.down_proj.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.gate_up_proj.gated(hidden, self.activation, self.down_proj.feed)
        return self.down_proj(inner)  # type: ignore[no-any-return]

    def follow(self, norm: RMSNorm) -> None:
        """See `ParallelLinear.follow`."""
        self.gate_up_proj.follow(norm)

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """The activation's number, if the kernels support it."""
        from models.ops.triton.cases.elementwise import ActivationCase

        del max_tokens
        gating = gating_of(self.activation)
        if gating is not None:
            features, feed = len(self.gate_up_proj.weight) // 2, self.down_proj.feed
            yield ActivationCase(features, gating, dtype)
            if feed is not None and feed.rounds(self.down_proj.weight.device):
                yield ActivationCase(features, gating, dtype, rounds=True)


class PlainMLP(nn.Module):
    """Feed-forward layer without a gate, of the config's intermediate size or of its own."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: TensorParallel,
        *,
        intermediate_size: int | None = None,
        reduces: bool = True,
    ) -> None:
        """`reduces`: see `LlamaMLP`."""
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        size, bias = config.intermediate_size if intermediate_size is None else intermediate_size, config.mlp_bias
        self.up_proj = ColumnParallelLinear(config.hidden_size, size, bias=bias, parallel=parallel)
        self.down_proj = RowParallelLinear(size, config.hidden_size, bias=bias, parallel=parallel, reduces=reduces)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(activate(self.up_proj(hidden), self.activation))  # type: ignore[no-any-return]

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """The activation."""
        from models.ops.triton.cases.elementwise import ActivationCase

        del max_tokens
        yield ActivationCase(len(self.up_proj.weight), Gating(self.activation), dtype, is_gated=False)


MakeNorm: TypeAlias = Callable[..., RMSNorm]
"""Makes a norm from its size, its epsilon and, if it reduces its input over ranks, these ranks."""
FeedForward: TypeAlias = Callable[[ModelConfig, int, TensorParallel], nn.Module]
"""Makes the feed-forward layer of the decoder layer with this index."""


def plain_feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
    """The feed-forward layer without a gate of the decoder layer with this index."""
    del layer  # All layers have the same feed-forward layer.
    return PlainMLP(config, parallel)


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection."""

    has_second_norm: ClassVar[bool] = True
    """Whether the feed-forward layer has a norm of its own."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        attention: type[nn.Module],
        feed_forward: FeedForward,
        parallel: TensorParallel,
        *,
        norm: MakeNorm = RMSNorm,
        residual_scale: float = 1.0,
    ) -> None:
        """`residual_scale`: factor of the outputs of attention and feed-forward before they are added to the
        residual."""
        super().__init__()
        self.residual_scale = residual_scale
        self.self_attn = attention(config, layer, parallel)
        self.mlp = feed_forward(config, layer, parallel)
        leave_sum_open(self.self_attn)
        leave_sum_open(self.mlp)
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps, parallel)
        round_for_reader(self.self_attn, self.input_layernorm)
        if self.has_second_norm:
            self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps, parallel)
            round_for_reader(self.mlp, self.post_attention_layernorm)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns two tensors whose sum, the first scaled, is the layer's output: the next norm adds them.

        With several ranks, the first is this rank's partial sum, which the next norm reduces over the ranks.

        # [tokens, hidden_size] each
        """
        hidden, residual = self.input_layernorm.add_norm(hidden, residual, self.residual_scale)
        hidden = self.self_attn(hidden, cos, sin)
        hidden, residual = self.post_attention_layernorm.add_norm(hidden, residual, self.residual_scale)
        return self.mlp(hidden), residual


class ParallelDecoderLayer(LlamaDecoderLayer):
    """Attention and feed-forward in parallel, which read the same norm; both outputs are added to the residual."""

    has_second_norm: ClassVar[bool] = False

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LlamaDecoderLayer`."""
        hidden, residual = self.input_layernorm.add_norm(hidden, residual, self.residual_scale)
        attended, fed_forward = self.self_attn(hidden, cos, sin), self.mlp(hidden)
        if self.input_layernorm.sums.size > 1:
            return add_rows(attended, fed_forward), residual
        return fed_forward, add_rows(residual, attended, self.residual_scale)


class SandwichDecoderLayer(nn.Module):
    """Attention and feed-forward, each between two norms, with residual connections."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        attention: type[nn.Module],
        feed_forward: FeedForward,
        parallel: TensorParallel,
        *,
        norm: MakeNorm = RMSNorm,
        residual_scale: float = 1.0,
    ) -> None:
        """`residual_scale`: see `LlamaDecoderLayer`."""
        super().__init__()
        self.residual_scale = residual_scale
        self.is_local = config.sliding_windows[layer] is not None
        self.self_attn = attention(config, layer, parallel)
        self.mlp = feed_forward(config, layer, parallel)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = norm(size, eps)
        self.post_attention_layernorm = norm(size, eps)
        self.pre_feedforward_layernorm = norm(size, eps)
        self.post_feedforward_layernorm = norm(size, eps)
        round_for_reader(self.self_attn, self.input_layernorm)
        round_for_reader(self.mlp, self.pre_feedforward_layernorm)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        attended = self.self_attn(self.input_layernorm(hidden), cos, sin)
        hidden = self._added(hidden, attended, self.post_attention_layernorm)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden))
        return self._added(hidden, fed_forward, self.post_feedforward_layernorm)

    def _added(self, hidden: torch.Tensor, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """`hidden`, which may be overwritten, plus the scaled norm of `x`. # [tokens, hidden_size] each"""
        if self.residual_scale == 1.0:
            return norm.norm_add(x, hidden)
        return add_rows(hidden, norm(x), self.residual_scale)


class PostNormDecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm after it, with residual connections."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        attention: type[nn.Module],
        feed_forward: FeedForward,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.is_local = config.sliding_windows[layer] is not None
        self.self_attn = attention(config, layer, parallel)
        self.mlp = feed_forward(config, layer, parallel)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        # The norm may overwrite its second operand, which the layer has read already.
        hidden = self.post_attention_layernorm.norm_add(self.self_attn(hidden, cos, sin), hidden)
        return self.post_feedforward_layernorm.norm_add(self.mlp(hidden), hidden)


class DecoderBody(nn.Module):
    """The body of a model; the head may share its embedding."""

    embed_tokens: VocabParallelEmbedding
    kept_streams: range = range(0)
    """Numbers of the residual streams that the body can store for the forward context."""


class TwoRopesBody(DecoderBody):
    """A body whose layers return complete outputs, and whose windowed layers may have a separate rope."""

    def __init__(
        self,
        config: ModelConfig,
        make_layer: Callable[[int], nn.Module],
        parallel: TensorParallel,
        *,
        local_rope: RopeConfig | None = None,
        norm: MakeNorm = RMSNorm,
        embed_scale: float = 1.0,
    ) -> None:
        """`make_layer` takes the layer's index; a layer has `is_local`. `local_rope`: that of windowed layers, None
        for the rope of the others.

        `embed_scale`: of embeddings.
        """
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, scale=embed_scale, parallel=parallel
        )
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_model_len)
        self.local_rotary_emb = None if local_rope is None else RotaryEmbedding(local_rope, config.max_model_len)
        self.layers = nn.ModuleList(make_layer(layer) for layer in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        everywhere = self.rotary_emb(positions)
        nearby = everywhere if self.local_rotary_emb is None else self.local_rotary_emb(positions)
        for layer in self.layers:
            hidden = layer(hidden, *(nearby if layer.is_local else everywhere))
        return self.norm(hidden)  # type: ignore[no-any-return]


class LlamaModel(DecoderBody):
    """Embedding, decoder layers and final norm."""

    def __init__(
        self,
        config: ModelConfig,
        attention: type[nn.Module],
        feed_forward: FeedForward,
        parallel: TensorParallel,
        *,
        decoder_layer: type[LlamaDecoderLayer] = LlamaDecoderLayer,
        norm: MakeNorm = RMSNorm,
        embed_scale: float = 1.0,
        residual_scale: float = 1.0,
        local_rope: RopeConfig | None = None,
    ) -> None:
        """`embed_scale`: of embeddings. `residual_scale`: see `LlamaDecoderLayer`. `local_rope`: of windows."""
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, scale=embed_scale, parallel=parallel
        )
        self.rotary_emb: nn.Module = RotaryEmbedding(config.rope, config.max_model_len)
        self.local_rotary_emb = None if local_rope is None else RotaryEmbedding(local_rope, config.max_model_len)
        self.kept_streams = range(config.num_hidden_layers)
        self.are_local = [window is not None for window in config.sliding_windows]
        self.residual_scale = residual_scale
        self.layers = nn.ModuleList(
            decoder_layer(config, layer, attention, feed_forward, parallel, norm=norm, residual_scale=residual_scale)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = norm(config.hidden_size, config.rms_norm_eps, parallel)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        hidden = self.embedded(input_ids)
        residual: torch.Tensor | None = None
        everywhere = nearby = self.rotary_emb(positions)
        if self.local_rotary_emb is not None:
            nearby = self.local_rotary_emb(positions)
        context = get_forward_context()
        for number, layer in enumerate(self.layers):
            if number in context.stream_layers:
                norm = cast(LlamaDecoderLayer, layer).input_layernorm
                context.streams[number] = _stream(norm, hidden, residual, self.residual_scale)
            hidden, residual = layer(hidden, residual, *(nearby if self.are_local[number] else everywhere))
        assert residual is not None, "a model has at least one layer"
        return self.norm.add_norm(hidden, residual, self.residual_scale)[0]

    def embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The first layer's input. # [tokens] int64 -> [tokens, hidden_size]"""
        return self.embed_tokens(input_ids)  # type: ignore[no-any-return]


def _stream(norm: RMSNorm, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Copy a layer's input, since later norms overwrite its memory. # 2 x [tokens, hidden_size]"""
    if residual is None:
        return join_columns(hidden)
    # The operators have the sum together with a norm, whose result is not used. It may overwrite a rank's part.
    part = hidden if norm.sums.size == 1 else join_columns(hidden)
    return norm.add_norm(part, join_columns(residual), scale)[1]


@architecture("LlamaForCausalLM", ConfigFacts(has_mlp_bias=True))
@architecture("MistralForCausalLM", ConfigFacts(fixed={"use_sliding_window": None}, bias_field="", is_windowed=True))
@architecture("MinistralForCausalLM", ConfigFacts(absent={"sliding_window": 4096}, bias_field="", is_windowed=True))
class LlamaForCausalLM(nn.Module):
    """Llama with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    """Module of the checkpoint -> packed module of the model, and its part there."""
    attention: ClassVar[type[nn.Module]] = LlamaAttention
    """The attention class, called with config, layer and parallel."""
    logit_scale: float = 1.0
    soft_cap: float | None = None
    """Scaled logits become `soft_cap * tanh(logits / soft_cap)`."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__()
        self.model = self.body(config, parallel)
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, bias=self.head_bias(config), parallel=parallel
        )
        if config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return LlamaModel(config, self.attention, self.feed_forward, parallel)

    @staticmethod
    def head_bias(config: ModelConfig) -> bool:
        """Whether the logits have a bias."""
        del config
        return False

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """The feed-forward layer of the decoder layer with this index."""
        del layer  # All layers have the same feed-forward layer.
        return LlamaMLP(config, parallel)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Final hidden states. # 2 x [tokens] int64 -> [tokens, hidden_size]"""
        return self.model(input_ids, positions)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [rows, hidden_size] -> [rows, vocab_size] float32"""
        logits: torch.Tensor = self.lm_head(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def kv_cache_layers(self) -> list[CacheSpec]:
        """The attention layers, first to last."""
        layers = [module for module in self.modules() if isinstance(module, Attention)]
        return [layer.cache_spec for layer in layers if layer.has_cache]


def soft_cap(fields: Fields, name: str) -> float | None:
    """The value of a field with a soft cap; None if it is missing or null."""
    return fields.number(name) if fields.has(name) else None
