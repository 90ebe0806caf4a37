"""`TransformersModel`: any decoder-only model of transformers, by its own code, over our paged attention.

The general route: `models.loader` takes it for checkpoints whose configuration is a `TransformersConfig`.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from models.base import CacheSpec
from models.checkpoint_files import some
from models.config_fields import Fields
from models.errors import CheckpointError, first_line
from models.quantization import parse_quantization
from models.registry import INDEXED_LAYERS
from models.transformers_attention import PAGED, PagedAttention, install, using_attention, watch_attention
from models.transformers_config import TransformersConfig
from models.transformers_indexed import IndexedAttention, IndexedCaches
from models.transformers_probe import probe
from models.transformers_weights import load_dequantized


class TransformersModel(nn.Module):
    """The body computes hidden states, step by step; the head's own code makes logits of those that are asked for."""

    def __init__(self, model: nn.Module, config: TransformersConfig, dtype: torch.dtype) -> None:
        """Find the attention of `model` in a pass of a few tokens; its keys and values are cached as `dtype`.

        Raises `CheckpointError` for a model that cannot be served.
        """
        super().__init__()
        self.model = model
        _fix_rotary_lengths(model, config.max_model_len)
        self._indexed = _indexed_caches(model, config.architecture)
        anatomy = _dissect(model, config.architecture, dtype, self._indexed)
        install(anatomy.attention)
        self._attention = list(anatomy.attention.values())
        self._body = [anatomy.body]
        """In a list, so that torch does not count its weights twice."""
        self._output_class = anatomy.output_class
        self._compute_body = anatomy.body.forward

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Final hidden states. # 2 x [tokens] int64 -> [tokens, hidden_size]"""
        caches = {} if self._indexed is None else self._indexed.served(positions)
        output = self._body[0](input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **caches)
        return cast(torch.Tensor, output.last_hidden_state[0])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own pass over these rows, with its body answering `hidden`: so caps and scales are its own.

        # [rows, hidden_size] -> [rows, vocab_size] float32
        """
        body = self._body[0]

        def answer(*_args: Any, **_kwargs: Any) -> Any:
            return self._output_class(last_hidden_state=hidden[None])

        body.forward = answer
        try:
            output = self.model(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.int64), use_cache=False)
        finally:
            body.forward = self._compute_body
        return cast(torch.Tensor, output.logits[0].float())

    def kv_cache_layers(self) -> list[CacheSpec]:
        """See `CausalLM`."""
        specs: list[CacheSpec] = [attention.cache_spec for attention in self._attention]
        return specs + ([] if self._indexed is None else list(self._indexed.index_specs.values()))

    def linear_layers(self) -> dict[str, nn.Linear]:
        """By transformers' name, those that adapters may add to.

        All but the head, which sees some tokens only, and what expands latents, which see every token's of a sequence.
        """
        apart = {cast("Any", self.model).get_output_embeddings()}
        apart |= {attention.kv_b for attention in self._attention if isinstance(attention, IndexedAttention)}
        layers = ((name, part) for name, part in self.model.named_modules() if isinstance(part, nn.Linear))
        return {name: layer for name, layer in layers if layer not in apart}

    def reference_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What transformers itself computes, with its own attention, for a sequence alone. # [n] -> [n, vocab_size]"""
        with using_attention(self.model, "eager"):
            output = self.model(input_ids=input_ids[None], use_cache=False)
        return cast(torch.Tensor, output.logits[0].float())


def load_transformers_model(
    path: Path, config: TransformersConfig, *, dtype: torch.dtype, device: torch.device, progress: bool
) -> TransformersModel:
    """The model of the checkpoint directory `path`, by transformers' own loader, proven on a few tokens.

    Raises `CheckpointError` for what transformers cannot load, or what it does not compute alike over paged caches.
    """
    (transformers_logging.enable_progress_bar if progress else transformers_logging.disable_progress_bar)()
    quantization = parse_quantization(Fields.from_file(path / "config.json"), path)
    try:
        if quantization is not None:
            model, report = load_dequantized(path, quantization, dtype=dtype, attention=PAGED)
        else:
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=PAGED,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except CheckpointError:
        raise
    except KeyError as error:
        if error.args == (PAGED,):
            raise _has_attention_of_its_own(config.architecture) from error
        raise CheckpointError(f"transformers cannot load {path}: it misses {first_line(error)}") from error
    except Exception as error:  # Whatever its many authors raise.
        raise CheckpointError(f"transformers cannot load {path}: {first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{path} lacks {some(missing)}, which transformers' {config.architecture} needs")
    if extra := sorted(report["unexpected_keys"]):
        raise CheckpointError(
            f"{path} holds {some(extra)}, for which transformers' {config.architecture} has no place"
        )
    try:
        model = model.to(device).eval()
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the memory of device {device} ({first_line(error)})") from error
    served = TransformersModel(model, config, dtype)
    try:
        probe(served, config, dtype=dtype, device=device)
    except CheckpointError:
        raise
    except Exception as error:  # The model's code may raise anything.
        raise CheckpointError(f"{config.architecture} fails on its first tokens: {first_line(error)}") from error
    return served


class _Anatomy(NamedTuple):
    """What a pass showed of a model."""

    attention: dict[nn.Module, PagedAttention | IndexedAttention]
    body: nn.Module
    """The part that the model's outermost code calls for hidden states."""
    output_class: Callable[..., Any]
    """Of what it answers."""


def _indexed_caches(model: nn.Module, architecture: str) -> IndexedCaches | None:
    """What a model with layers of indexed attention is given as its caches; None for any other."""
    text = cast("Any", model).config.get_text_config(decoder=True)
    return IndexedCaches(architecture) if INDEXED_LAYERS & set(getattr(text, "layer_types", None) or ()) else None


def _dissect(model: nn.Module, architecture: str, dtype: torch.dtype, indexed: IndexedCaches | None) -> _Anatomy:
    """Run a few tokens and see who calls whom. Raises `CheckpointError` for a model that cannot be served."""
    depth = 0
    outermost: list[tuple[nn.Module, Any]] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            outermost.append((module, output))

    parts = [part for part in model.modules() if part is not model]
    hooks = [part.register_forward_pre_hook(enter) for part in parts]
    hooks += [part.register_forward_hook(leave) for part in parts]
    tokens = torch.arange(4, device=next(model.parameters()).device)[None]
    try:
        with torch.inference_mode(), watch_attention(model, architecture, dtype, indexed) as attention:
            caches = {} if indexed is None else indexed.watched(tokens)
            model(input_ids=tokens, position_ids=tokens, use_cache=False, **caches)
    except CheckpointError:
        raise
    except Exception as error:  # The model's code may raise anything.
        raise CheckpointError(
            f"{architecture} does not run on tokens and their positions alone ({first_line(error)}), which is all "
            "that the general route gives it"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if not attention:
        raise _has_attention_of_its_own(architecture)
    inside = next(iter(attention))
    bodies = [(module, output) for module, output in outermost if inside in set(module.modules())]
    if len(bodies) != 1 or not hasattr(bodies[0][1], "last_hidden_state"):
        raise CheckpointError(f"{architecture} is not a body and a head, so the general route cannot serve it")
    if "position_ids" not in inspect.signature(bodies[0][0].forward).parameters:
        raise CheckpointError(
            f"{architecture} takes no position_ids (it counts positions from the start of a step), so the general "
            "route cannot serve it"
        )
    return _Anatomy(attention, bodies[0][0], type(bodies[0][1]))


def _fix_rotary_lengths(model: nn.Module, max_model_len: int) -> None:
    """Fit the rotary embeddings that depend on the longest sequence of a step to the longest that is served.

    Else a long sequence would turn the keys of its neighbours, and cached keys would not fit later queries.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            if changing := sorted(str(name) for name in kind.values() if "dynamic" in str(name) or name == "longrope"):
                raise CheckpointError(
                    f"rope type {changing[0]} by kind of layer changes with a step's longest sequence, which the "
                    "general route cannot serve"
                )
        elif isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            weight = next(model.parameters())
            with torch.inference_mode(False), torch.no_grad():
                module(weight[:1], torch.tensor([[max_model_len - 1]], device=weight.device))
            module.rope_type = "default"  # type: ignore[assignment]


def _has_attention_of_its_own(architecture: str) -> CheckpointError:
    return CheckpointError(
        f"{architecture} computes no attention through transformers' attention interface (it has its own, as models "
        "with ALiBi biases do, or keeps a recurrent state), so the general route cannot serve it"
    )
