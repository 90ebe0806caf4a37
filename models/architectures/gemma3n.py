"""Gemma 3n's text model: Gemma's layers with several residual streams, which each layer predicts and corrects."""

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.gemma3 import local_rope
from models.architectures.gemma4 import (
    Gemma4Attention,
    LayerInputsBody,
    LayerInputsLayer,
    caches_of,
    unread_of_shared_layers,
)
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.linear import ColumnParallelLinear
from models.layers.norm import RMSNorm
from models.layers.parameter import empty_parameter, load_whole
from models.layers.rotary import RotaryEmbedding
from models.ops.activation import ACTIVATIONS, activate
from models.ops.types import Rotation
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_MIN_MAGNITUDE = 1e-5
"""Lower limit of the mean square by which a stream is scaled."""


class AltUp(nn.Module):
    """Alternating updates (Baykal et al., 2023): a layer computes only the active stream; others are extrapolated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        fields, size = config.fields, config.hidden_size
        count = fields.integer("altup_num_inputs")
        self.active = fields.integer("altup_active_idx", minimum=0, maximum=count - 1)
        self.scales_output = fields.boolean("altup_correct_scale", True)
        self.correct_output_scale = empty_parameter(size, weight_loader=load_whole)
        self.correction_coefs = ColumnParallelLinear(count, count)
        self.prediction_coefs = ColumnParallelLinear(count, count * count)
        self.modality_router = ColumnParallelLinear(size, count)
        self.router_norm = RMSNorm(size, config.rms_norm_eps)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """Predict each stream as itself plus a linear combination of all. # [tokens, streams, hidden_size] -> same"""
        tokens, count, _ = streams.shape
        coefficients = self.prediction_coefs(self._modalities(streams[:, self.active].contiguous()))
        combined: torch.Tensor = coefficients.view(tokens, count, count).float() @ streams.float()
        return (combined + streams).to(streams.dtype)

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Correct all predicted streams by the difference of the computed and the predicted active stream.

        # [tokens, streams, hidden_size], [tokens, hidden_size] -> [tokens, streams, hidden_size]
        """
        factors: torch.Tensor = self.correction_coefs(self._modalities(computed)) + 1.0
        return predicted + factors[..., None] * (computed - predicted[:, self.active])[:, None]

    def scaled(self, stream: torch.Tensor) -> torch.Tensor:
        """Scale the corrected active stream, the input of the per-layer gate. # [tokens, hidden_size] -> same"""
        return stream * self.correct_output_scale if self.scales_output else stream.contiguous()

    def _modalities(self, x: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, streams]"""
        routed: torch.Tensor = self.modality_router(self.router_norm(x))
        return (routed.float() / x.shape[1]).tanh().to(x.dtype)


class Laurel(nn.Module):
    """Learned augmented residual layer: the input plus its normalised low-rank projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, rank = config.hidden_size, config.fields.integer("laurel_rank")
        self.linear_left = ColumnParallelLinear(size, rank)
        self.linear_right = ColumnParallelLinear(rank, size)
        self.post_laurel_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        projected: torch.Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(hidden)))
        return hidden + projected


class Gemma3nMLP(LlamaMLP):
    """Gated feed-forward layer. Some layers have sparse gates: each gate is reduced by a quantile of the normal
    distribution with the gates' mean and deviation, and negative results become 0."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        size: int = config.fields.values["intermediate_sizes"][layer]
        super().__init__(config, parallel, intermediate_size=size)
        self.parallel, self.size = parallel, size
        sparsity = _sparsity(config)[layer]
        self.deviations = (
            torch.special.ndtri(torch.tensor(sparsity, dtype=torch.float64, device="cpu")).item() if sparsity else None
        )
        """The quantile in standard deviations above the mean; None if the layer's gates are not sparse."""
        self.operator = ACTIVATIONS[config.activation]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        if self.deviations is None:
            return super().forward(hidden)
        gate: torch.Tensor
        up: torch.Tensor
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        exact = gate.float()
        mean = self._mean(exact)
        deviation = self._mean((exact - mean).square()).sqrt()
        kept = (exact - (mean + self.deviations * deviation)).relu().to(gate.dtype)
        return self.down_proj(activate(kept, self.operator, up))  # type: ignore[no-any-return]

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the features of all ranks. # [tokens, the rank's features] float32 -> [tokens, 1]"""
        total: torch.Tensor = self.parallel.all_reduce(values.sum(-1, keepdim=True))
        return total / self.size


class Gemma3nDecoderLayer(LayerInputsLayer):
    """Attention and feed-forward of the active stream, each between two norms, and a per-layer input."""

    def __init__(self, config: ModelConfig, layer: int, cache_of: int | None, parallel: TensorParallel) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.own_size = config.fields.integer("hidden_size_per_layer_input")
        self.is_local = config.sliding_windows[layer] is not None
        self.self_attn = Gemma4Attention(config, layer, cache_of, parallel)
        self.mlp = Gemma3nMLP(config, layer, parallel)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.altup, self.laurel = AltUp(config), Laurel(config)
        self.activation = ACTIVATIONS[config.activation]
        self.per_layer_input_gate = ColumnParallelLinear(size, self.own_size)
        self.per_layer_projection = ColumnParallelLinear(self.own_size, size)
        self.post_per_layer_input_norm = RMSNorm(size, eps)

    def forward(self, streams: torch.Tensor, own: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """`own`: the per-layer input. # [tokens, streams, hidden_size], [tokens, own_size] -> as the first"""
        predicted = self.altup.predict(streams)
        active = predicted[:, self.altup.active].contiguous()
        normed = self.input_layernorm(active)
        attended = self.post_attention_layernorm(self.self_attn(normed, rotation))
        hidden = (active + attended + self.laurel(normed)) * 2**-0.5
        fed_forward = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        corrected = self.altup.correct(predicted, hidden + fed_forward)
        first = self.altup.scaled(corrected[:, self.altup.active])
        gated = activate(self.per_layer_input_gate(first), self.activation, own)
        corrected[:, 1:] += self.post_per_layer_input_norm(self.per_layer_projection(gated))[:, None]
        return corrected


class Gemma3nModel(LayerInputsBody):
    """Scaled embedding, projection to streams, decoder layers, mean of the streams, and the final norm."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__(config, parallel)
        size, others = config.hidden_size, config.fields.integer("altup_num_inputs") - 1
        self.altup_projections = nn.ModuleList(ColumnParallelLinear(size, size) for _ in range(others))
        self.altup_unembed_projections = nn.ModuleList(ColumnParallelLinear(size, size) for _ in range(others))
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_model_len)
        self.local_rotary_emb = RotaryEmbedding(local_rope(config), config.max_model_len)
        caches = caches_of(config)
        self.layers = nn.ModuleList(
            Gemma3nDecoderLayer(config, layer, caches[layer], parallel) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        own = self.own_inputs(input_ids, embedded)
        others = [_as_large(project(embedded), embedded) for project in self.altup_projections]
        streams = torch.stack([embedded, *others], dim=1)
        everywhere, nearby = self.rotary_emb(positions), self.local_rotary_emb(positions)
        for number, layer in enumerate(self.layers):
            streams = layer(streams, own[:, number], nearby if layer.is_local else everywhere)
        first, *rest = (stream.contiguous() for stream in streams.unbind(1))
        pairs = zip(self.altup_unembed_projections, rest, strict=True)
        others = [_as_large(project(stream), first) for project, stream in pairs]
        return self.norm(torch.stack([first, *others]).float().mean(0).to(first.dtype))  # type: ignore[no-any-return]


def _as_large(stream: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Scale a stream to the magnitude of `like`. # 2 x [tokens, hidden_size] -> [tokens, hidden_size]"""
    exact = stream.float()
    wanted = like.float().square().mean(-1, keepdim=True).sqrt()
    found = exact.square().mean(-1, keepdim=True).clamp(min=_MIN_MAGNITUDE).sqrt()
    return (exact * wanted / found).to(stream.dtype)


def _sparsity(config: ModelConfig) -> list[float]:
    """Return the share of gates that each layer sets to zero."""
    fields, count = config.fields, config.num_hidden_layers
    found = fields.values.get("activation_sparsity_pattern")
    if found is None:
        sparse = 10 if count > 10 else 0
        return [0.95] * sparse + [0.0] * (count - sparse)
    is_list = isinstance(found, list) and len(found) == count
    if not is_list or not all(isinstance(each, int | float) and 0 <= each < 1 for each in found):
        raise fields.invalid("activation_sparsity_pattern", f"a list of {count} numbers from 0 to below 1")
    return [float(each) for each in found]


def _complete(config: Fields) -> Fields:
    """Add `intermediate_sizes`, one per layer, from a list or one number in config.json."""
    count, found = config.integer("num_hidden_layers"), config.values["intermediate_size"]
    if not isinstance(found, list):
        found = [config.integer("intermediate_size")] * count
    if len(found) != count or not all(type(size) is int and size > 0 for size in found):
        raise config.invalid("intermediate_size", f"a positive integer, or a list of {count}")
    return Fields({**config.values, "intermediate_size": max(found), "intermediate_sizes": found}, config.where)


_FACTS = ConfigFacts(
    defaults={
        "altup_active_idx": 0,
        "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 16384,
        "laurel_rank": 64,
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    },
    complete=_complete,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    full_attention_every=5,
    unread=unread_of_shared_layers,
)


@architecture("Gemma3nForCausalLM", _FACTS)
class Gemma3nForCausalLM(LlamaForCausalLM):
    """Gemma 3n's text model with its language-model head."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__(config, parallel)
        self.soft_cap = config.fields.number("final_logit_softcapping")

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return Gemma3nModel(config, parallel)
