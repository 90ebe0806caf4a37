"""Checkpoints of MTP layers and EAGLE heads in their published layouts, plain references of them, and `PagedDraft`.

A reference computes a whole sequence at once, from tokens and the hidden states that are read with them. It is written
from the papers: EAGLE (2401.15077), EAGLE-3 (2503.01840), DeepSeek-V3 (2412.19437). The decoder layer of an MTP module
is the target's own, computed by transformers.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from engine.runner.kv_cache import LayerCaches
from models.attention.backend import AttentionBatch, select_backend
from models.attention.context import Context, forward_context
from models.layers.base import DraftLM
from models.loading.checkpoint import read_checkpoint_config
from models.loading.drafters import DraftedModel, load_drafter
from models.loading.loader import LoadOptions, load_model
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import CPU, tensors_of
from tests.parity.variants import Variant

WEIGHTS, CONFIG = "model.safetensors", "config.json"
BLOCK_SIZE = 16


class Reference(Protocol):
    """A drafter over whole sequences."""

    def forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """The output for tokens and the hidden states that are read with them. # [n], [n, H] -> [n, H]"""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [n, H] -> [n, V]"""

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [n, features] -> [n, H]"""


# Checkpoints


NAMED_MTP = {"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
"""Architectures whose layer of multi-token prediction has names of its own, `mtp.*`."""


class MTPPair:
    """A target with an MTP layer as published, and the same layers as one deeper model, for the reference."""

    def __init__(self, directory: Path, variant: Variant, *, has_own: bool = False, seed: int = 0) -> None:
        """`has_own`: whether the layer has an embedding and a head other than the target's."""
        self.whole, self.path = directory / "whole", directory / "published"
        overrides = dict(variant.overrides)
        num_layers = overrides.pop("num_hidden_layers", variant.family.defaults.get("num_hidden_layers", 2))
        if variant.architecture in NAMED_MTP:
            overrides["layer_types"] = [*["linear_attention", "full_attention"] * (num_layers // 2), "full_attention"]
        for name, kind in (("indexer_types", "full"), ("mlp_layer_types", "sparse")):
            if kinds := overrides.get(name, variant.family.defaults.get(name)):
                overrides[name] = [*kinds, kind]
        make_checkpoint(self.whole, variant.family, seed=seed, num_hidden_layers=num_layers + 1, **overrides)
        shutil.copytree(self.whole, self.path)
        tensors = load_file(self.whole / WEIGHTS)
        size = json.loads((self.whole / CONFIG).read_text())["hidden_size"]
        draw = _Weights(seed + 1, norm_mean=variant.family.norm_mean)
        prefix = f"model.layers.{num_layers}."
        if variant.architecture in NAMED_MTP:
            layer = [name for name in tensors if name.startswith(prefix)]
            tensors |= {name.replace(prefix, "mtp.layers.0."): tensors.pop(name) for name in layer}
            self.own = {
                "mtp.fc.weight": draw.product(size, 2 * size),
                "mtp.pre_fc_norm_embedding.weight": draw.norm(size),
                "mtp.pre_fc_norm_hidden.weight": draw.norm(size),
                "mtp.norm.weight": draw.norm(size),
            }
            self.names = list(self.own)
        else:
            self.names = [f"{prefix}{name}" for name in _LAYERED]
            embedding = tensors["model.embed_tokens.weight"]
            head = tensors.get("lm_head.weight", embedding)
            self.own = dict(
                zip(
                    [*self.names, f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"],
                    [
                        draw.product(size, 2 * size),
                        *(draw.norm(size) for _ in range(3)),
                        draw.product(*embedding.shape, fan_in=1) if has_own else embedding.clone(),
                        draw.product(*head.shape) if has_own else head.clone(),
                    ],
                    strict=True,
                )
            )
        save_file(tensors | self.own, self.path / WEIGHTS, {"format": "pt"})
        edit_json(self.path / CONFIG, num_hidden_layers=num_layers, num_nextn_predict_layers=1)
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            kinds = json.loads((self.path / CONFIG).read_text()).get(name)
            if kinds is not None:
                edit_json(self.path / CONFIG, **{name: kinds[:num_layers]})
        self.num_layers = num_layers


_PUBLISHED_V4 = {
    ".self_attn.compressor.indexer.": ".attn.indexer.compressor.",
    ".self_attn.sinks": ".attn.attn_sink",
    ".self_attn.q_a_norm": ".attn.q_norm",
    ".self_attn.q_a_proj": ".attn.wq_a",
    ".self_attn.q_b_proj": ".attn.wq_b",
    ".self_attn.kv_proj": ".attn.wkv",
    ".self_attn.o_a_proj": ".attn.wo_a",
    ".self_attn.o_b_proj": ".attn.wo_b",
    ".self_attn.": ".attn.",
    ".input_layernorm": ".attn_norm",
    ".post_attention_layernorm": ".ffn_norm",
    ".attn_hc.": ".hc_attn_",
    ".ffn_hc.": ".hc_ffn_",
    ".mlp.gate.e_score_correction_bias": ".ffn.gate.bias",
    ".mlp.": ".ffn.",
}
"""Parts of transformers' names of a layer of DeepSeek-V4, and those of published checkpoints."""


class V4Pair:
    """A target of DeepSeek-V4 with its MTP layer as published, and the same layers as one deeper model."""

    def __init__(self, directory: Path, variant: Variant) -> None:
        self.whole, self.path = directory / "whole", directory / "published"
        kinds = {"layer_types": "sliding_attention", "mlp_layer_types": "moe"}
        fields = {**variant.family.defaults, **variant.overrides}
        self.num_layers = num_layers = fields["num_hidden_layers"]
        deeper = {name: [*fields[name], kind] for name, kind in kinds.items()}
        make_checkpoint(
            self.whole, variant.family, **{**variant.overrides, **deeper, "num_hidden_layers": num_layers + 1}
        )
        shutil.copytree(self.whole, self.path)
        tensors = load_file(self.whole / WEIGHTS)
        config = json.loads((self.whole / CONFIG).read_text())
        size, count = config["hidden_size"], config["hc_mult"]
        draw = _Weights(1)
        self.own = {
            **{f"{name}.weight": draw.norm(size) for name in ("enorm", "hnorm", "norm")},
            **{f"{name}.weight": draw.product(size, size) for name in ("e_proj", "h_proj")},
            "hc_head_fn": draw.product(count, count * size),
            "hc_head_base": draw.product(count, fan_in=4),
            "hc_head_scale": draw.norm(1),
        }
        prefix = f"model.layers.{num_layers}."
        for name in [name for name in tensors if name.startswith(prefix)]:
            published = name.replace(prefix, "mtp.0.")
            for ours, theirs in _PUBLISHED_V4.items():
                published = published.replace(ours, theirs)
            tensors[published] = tensors.pop(name)
        tensors |= {f"mtp.0.{name}": tensor for name, tensor in self.own.items()}
        save_file(tensors, self.path / WEIGHTS, {"format": "pt"})
        edit_json(self.path / CONFIG, num_hidden_layers=num_layers, num_nextn_predict_layers=1)
        for name in kinds:
            edit_json(self.path / CONFIG, **{name: fields[name]})


class V4Reference:
    """See `Reference`: DeepSeek's own code of the layer, written in torch, around transformers' decoder layer."""

    def __init__(self, pair: V4Pair) -> None:
        self._own, self._num_layers = pair.own, pair.num_layers
        deep = AutoModelForCausalLM.from_pretrained(pair.whole, dtype=torch.float32, attn_implementation="eager")
        self._deep, self._head, self._layers = deep.eval().model, deep.lm_head.weight, list(deep.model.layers)
        self._eps, self._hc_eps = deep.config.rms_norm_eps, deep.config.hc_eps
        self._count: int = deep.config.hc_mult

    def _through(
        self, layers: list[nn.Module], embedded: torch.Tensor, streams: torch.Tensor | None, **ids: Any
    ) -> Any:
        """The streams that the first of these layers receives. # [n, count, H]"""
        self._deep.layers, found = nn.ModuleList(layers), []
        hooks = [layers[-1].register_forward_hook(lambda _module, _args, output: found.append(output[0]))]
        if streams is not None:
            hooks.append(layers[0].register_forward_pre_hook(lambda _module, args: (streams[None], *args[1:])))
        self._deep.config.num_hidden_layers = len(layers)
        self._deep(use_cache=False, **(ids or {"inputs_embeds": embedded[None]}))
        for hook in hooks:
            hook.remove()
        return found[0]

    @torch.inference_mode()
    def streams_of(self, tokens: list[int]) -> torch.Tensor:
        """The target's streams after its last layer, concatenated. # [n, count * H]"""
        ids = torch.tensor([tokens])
        return self._through(self._layers[: self._num_layers], ids, None, input_ids=ids).flatten(1)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        own, eps = self._own, self._eps
        embedded = F.embedding(torch.tensor(tokens), self._deep.embed_tokens.weight)
        read = rms(hidden.view(len(tokens), self._count, -1), own["hnorm.weight"], eps) @ own["h_proj.weight"].T
        fused = read + (rms(embedded, own["enorm.weight"], eps) @ own["e_proj.weight"].T)[:, None]
        return self._through(self._layers[self._num_layers :], embedded, fused).flatten(1)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._own
        mixes = (hidden * (hidden.square().mean(-1, keepdim=True) + self._eps).rsqrt()) @ own["hc_head_fn"].T
        shares = torch.sigmoid(mixes * own["hc_head_scale"] + own["hc_head_base"]) + self._hc_eps
        summed = (shares[..., None] * hidden.view(len(hidden), self._count, -1)).sum(1)
        return rms(summed, own["norm.weight"], self._eps) @ self._head.T

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


_LAYERED = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")


class _Weights:
    """Random tensors with the scales of `make_checkpoint`."""

    def __init__(self, seed: int, norm_mean: float = 1.0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._norm_mean = norm_mean

    def product(self, *shape: int, fan_in: int | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * (1.5 * (fan_in or shape[-1]) ** -0.5)

    def norm(self, size: int) -> torch.Tensor:
        return self._norm_mean + 0.2 * torch.randn(size, generator=self._generator)


def make_eagle(
    directory: Path,
    target: Path,
    *,
    version: int,
    num_layers: int = 1,
    draft_vocab_size: int | None = None,
    has_own_embedding: bool = False,
    has_own_head: bool = False,
    has_bias: bool = False,
    seed: int = 5,
    **config: Any,
) -> Path:
    """Write an EAGLE (`version` 1) or EAGLE-3 (3) head for a target, and return its directory."""
    directory.mkdir(parents=True)
    fields = json.loads((target / CONFIG).read_text())
    vocab, target_size = fields["vocab_size"], fields["hidden_size"]
    values = {
        "architectures": ["LlamaForCausalLMEagle3" if version == 3 else "LlamaForCausalLMEagle"],
        "hidden_size": target_size,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab,
        **({} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}),
        **config,
    }
    (directory / CONFIG).write_text(json.dumps(values))
    size, heads, kv_heads, dim = (
        values[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    draw = _Weights(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(num_layers):
        prefix = "midlayer." if version == 3 else f"layers.{layer}."
        inputs = 2 * size if version == 3 else size
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": draw.product(heads * dim, inputs),
            f"{prefix}self_attn.k_proj.weight": draw.product(kv_heads * dim, inputs),
            f"{prefix}self_attn.v_proj.weight": draw.product(kv_heads * dim, inputs),
            f"{prefix}self_attn.o_proj.weight": draw.product(size, heads * dim),
            f"{prefix}mlp.gate_proj.weight": draw.product(values["intermediate_size"], size),
            f"{prefix}mlp.up_proj.weight": draw.product(values["intermediate_size"], size),
            f"{prefix}mlp.down_proj.weight": draw.product(size, values["intermediate_size"]),
            f"{prefix}post_attention_layernorm.weight": draw.norm(size),
        }
        if version == 3 or layer:
            tensors[f"{prefix}input_layernorm.weight"] = draw.norm(size)
    if version == 3:
        tensors |= {
            "midlayer.hidden_norm.weight": draw.norm(size),
            "fc.weight": draw.product(size, 3 * values.get("target_hidden_size", target_size)),
            "norm.weight": draw.norm(size),
        }
        if draft_vocab_size is not None:
            chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size].sort()[0]
            tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    else:
        tensors["fc.weight"] = draw.product(size, 2 * size)
        if has_bias:
            tensors["fc.bias"] = draw.norm(size) - 1
    if has_own_embedding:
        tensors["embed_tokens.weight"] = draw.product(vocab, size, fan_in=1)
    if has_own_head or draft_vocab_size is not None:
        tensors["lm_head.weight"] = draw.product(draft_vocab_size or vocab, size)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return directory


# References


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm."""
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


class TargetStates:
    """Hidden states of the target, by transformers."""

    def __init__(self, path: Path, num_layers: int | None = None) -> None:
        """`num_layers`: the number of first layers to compute; None: all."""
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if num_layers is not None:
            self.model.model.layers = self.model.model.layers[:num_layers]
            self.model.config.num_hidden_layers = num_layers

    @torch.inference_mode()
    def final(self, tokens: list[int]) -> torch.Tensor:
        """Hidden states after the final norm. # [n, H]"""
        return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def inputs_of(self, layers: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
        """Residual streams that layers receive, concatenated. # [n, H * layers]"""
        output = self.model.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        return torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1)


class MTPReference:
    """See `Reference`."""

    def __init__(self, pair: MTPPair, eps: float) -> None:
        self._own, self._names, self._eps = pair.own, pair.names, eps
        deep = AutoModelForCausalLM.from_pretrained(
            pair.whole, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._embedding = deep.model.embed_tokens.weight
        self._head = deep.lm_head.weight
        self._offset = 1.0 if pair.names[0].startswith("mtp.") else 0.0
        for name, tensor in pair.own.items():
            if name.endswith("embed_tokens.weight"):
                self._embedding = tensor
            if name.endswith("shared_head.head.weight"):
                self._head = tensor
        deep.model.layers = deep.model.layers[-1:]
        deep.model.norm = nn.Identity()
        deep.config.num_hidden_layers = 1
        if getattr(deep.config, "layer_types", None):
            deep.config.layer_types = deep.config.layer_types[-1:]
        self._deep = deep.model

    def _norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return rms(x, self._own[self._names[index]] + self._offset, self._eps)

    @torch.inference_mode()
    def forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = F.embedding(torch.tensor(tokens), self._embedding)
        fused = torch.cat([self._norm(embedded, 1), self._norm(hidden, 2)], dim=-1) @ self._own[self._names[0]].T
        return self._norm(self._deep(inputs_embeds=fused[None], use_cache=False).last_hidden_state[0], 3)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._head.T

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class EagleReference:
    """See `Reference`; for both versions."""

    def __init__(self, path: Path, target: Path) -> None:
        self._config = json.loads((path / CONFIG).read_text())
        self._tensors = load_file(path / WEIGHTS)
        of_target = load_file(target / WEIGHTS)
        embedding = of_target["model.embed_tokens.weight"]
        self._embedding = self._tensors.get("embed_tokens.weight", embedding)
        self._head = self._tensors.get("lm_head.weight", of_target.get("lm_head.weight", embedding))
        self._is_third = "norm.weight" in self._tensors

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._tensors["fc.weight"].T if self._is_third else hidden

    def forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = F.embedding(torch.tensor(tokens), self._embedding)
        if self._is_third:
            normed = self._norm(hidden, "midlayer.hidden_norm")
            read = torch.cat([self._norm(embedded, "midlayer.input_layernorm"), normed], dim=-1)
            stream = normed if self._config.get("norm_before_residual") else hidden
            return self._layer("midlayer", read, stream)
        stream = torch.cat([embedded, hidden], dim=-1) @ self._tensors["fc.weight"].T
        stream = stream + self._tensors.get("fc.bias", torch.zeros(()))
        for layer in range(self._config["num_hidden_layers"]):
            name = f"layers.{layer}"
            stream = self._layer(name, self._norm(stream, f"{name}.input_layernorm") if layer else stream, stream)
        return stream

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._is_third:
            return hidden @ self._head.T
        found = self._norm(hidden, "norm") @ self._head.T
        if "d2t" not in self._tensors:
            return found
        logits = torch.full((len(hidden), self._config["vocab_size"]), -torch.inf)
        for draft, distance in enumerate(self._tensors["d2t"].tolist()):
            logits[:, draft + distance] = found[:, draft]
        return logits

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, self._tensors[f"{name}.weight"], self._config["rms_norm_eps"])

    def _layer(self, name: str, read: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        def linear(x: torch.Tensor, part: str) -> torch.Tensor:
            return x @ self._tensors[f"{name}.{part}.weight"].T

        heads, kv_heads, dim = (self._config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (linear(read, f"self_attn.{part}_proj").view(len(read), -1, dim).transpose(0, 1) for part in "qkv")
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (self._rotate(k), v))
        scores = self._rotate(q) @ k.transpose(1, 2) / math.sqrt(dim)
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        stream = stream + linear(attended, "self_attn.o_proj")
        normed = self._norm(stream, f"{name}.post_attention_layernorm")
        return stream + linear(
            F.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj"), "mlp.down_proj"
        )

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Halves rotated by position. # [heads, n, dim]"""
        dim = x.shape[-1]
        angles = torch.arange(x.shape[1])[:, None] * self._config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )


# The drafter under test


def load_head(
    method: str,
    target: Path,
    path: Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    parallel: TensorParallel = SINGLE_RANK,
) -> DraftLM:
    """The drafter of a method, with its target loaded as the runner loads it."""
    config = read_checkpoint_config(target, "kaon")
    model = load_model(target, config, dtype=dtype, device=CPU, progress=False, parallel=parallel)
    drafted = DraftedModel(
        model=model,
        config=config,
        path=target,
        options=LoadOptions(dtype=dtype, device=CPU, progress=False, parallel=parallel),
    )  # type: ignore[arg-type]
    return load_drafter(method, drafted, path)


class PagedDraft:
    """A drafter with a paged cache full of NaN, over one sequence with blocks in random order."""

    def __init__(self, drafter: DraftLM, dtype: torch.dtype = torch.float32, *, num_blocks: int = 8) -> None:
        self.drafter = drafter
        self._backend = select_backend(CPU)
        specs = drafter.kv_cache_layers()
        caches = LayerCaches(specs, self._backend, block_size=BLOCK_SIZE, num_slots=1, dtype=dtype, device=CPU)
        self._cache = caches.allocate(num_blocks)
        for layer in self._cache.values():
            for tensor in tensors_of(layer):
                tensor.fill_(torch.nan)
        self._blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)

    @torch.inference_mode()
    def step(self, first: int, compute: Callable[[torch.Tensor], torch.Tensor], count: int) -> torch.Tensor:
        """The results of `compute` for the positions from `first` on, in steps of `step` positions. # [count, H]"""
        span = np.arange(first, first + count)
        metadata = self._backend.build_metadata(
            AttentionBatch(
                query_lens=np.array([count]),
                seq_lens=np.array([first + count]),
                block_tables=self._blocks[None],
                slot_mapping=self._blocks[span // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + span % BLOCK_SIZE,
                num_decodes=int(count == 1),
                states=np.zeros(1, dtype=np.int64),
            )
        )
        positions = torch.from_numpy(span)
        context = Context(positions=positions, is_prefill=count > 1, batch_size=1)
        with forward_context(metadata, context, kv_cache_data=self._cache):
            return compute(positions).clone()

    def run(self, tokens: list[int], hidden: torch.Tensor, first: int = 0) -> torch.Tensor:
        """`forward` of tokens from position `first` on. # [n], [n, H] -> [n, H]"""
        ids = torch.tensor(tokens)
        return self.step(first, lambda positions: self.drafter(ids, positions, hidden), len(tokens))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [n, H] -> [n, V] float32"""
        return self.drafter.compute_logits(hidden)
