"""The general route: any decoder-only model of transformers, by its own code, over Kaon's paged attention.

`load_transformers_model` is called by the loader for checkpoints whose configuration is a `TransformersConfig`. This
module contains, in order: that function; `TransformersModel`; how the model's structure is found; reading of quantised
weights; and the check that batched steps over paged caches give the same logits as each sequence alone.
"""

import inspect
import logging
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from models.architectures.registry import INDEXED_LAYERS
from models.attention.backend import AttentionBatch, select_backend
from models.attention.context import Context, forward_context, get_forward_context
from models.config.fields import read_config
from models.config.rope import RopeContext, without_lengths
from models.config.weight_files import some, weight_files
from models.errors import CheckpointError, first_line
from models.layers.base import CacheSpec, KVCacheSpec, StateCacheSpec, VectorCacheSpec
from models.layers.rotary import RotaryByLength
from models.loading.checkpoint import TransformersConfig, causal_model_class, tensors_of_file
from models.loading.transformers_attention import (
    PAGED,
    IndexedAttention,
    IndexedCaches,
    PagedAttention,
    install,
    replace_methods,
    using_attention,
    watch_attention,
)
from models.loading.transformers_states import RecurrentStates, context_of_part
from models.ops.types import KVCacheTensor, LayerCache, StateCache, VectorCache
from models.quantization.config import QuantizationConfig
from models.quantization.dequantize import Dequantizer
from models.torch_import import load_meta_kernels

_log = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_STEPS = ((5, 3, 1), (4, 1, 4), (3, 5, 1), (5, 1, 3), (6, 2, 1), (4, 1, 4))
"""Numbers of tokens of each sequence in the steps of the check: prefills, then decodes next to chunks of prefills.

All sequences have the same length, and one block each."""
_TOLERANCE = 1e-4
"""Relative error of logits that is accepted in any dtype."""
_FACTOR_BY_TOKEN = 2
"""Prompts are computed token by token if their chunks at once have errors that are larger by this factor."""
_NO_LIMIT = (0.0, float("inf"))
"""The range of time steps in a Mamba-2 layer without limits."""


def load_transformers_model(
    path: Path, config: TransformersConfig, *, dtype: torch.dtype, device: torch.device, progress: bool
) -> "TransformersModel":
    """Load the checkpoint directory `path` by transformers' own loader, and check the model on a few tokens.

    Raises `CheckpointError` if transformers cannot load it, or if it computes other logits over paged caches.
    """
    load_meta_kernels()  # transformers creates models on the device `meta`, and may compile functions.
    (transformers_logging.enable_progress_bar if progress else transformers_logging.disable_progress_bar)()
    try:
        try:
            model, report = _load(path, config, dtype, PAGED)
        except KeyError as error:
            if error.args != (PAGED,):
                raise
            # The model chooses among attention classes of its own.
            model, report = _load(path, config, dtype, "eager")
            if not replace_methods(model):
                raise _has_attention_of_its_own(config.architecture) from error
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"transformers cannot load {path}: it misses {first_line(error)}") from error
    except Exception as error:  # Model classes may raise anything.
        _require_padding_token(path)
        raise CheckpointError(f"transformers cannot load {path}: {first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{path} lacks {some(missing)}, which transformers' {config.architecture} needs")
    if extra := sorted(report["unexpected_keys"]):
        raise CheckpointError(f"{path} holds {some(extra)}, which transformers' {config.architecture} does not have")
    try:
        model = model.to(device).eval()
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the memory of device {device} ({first_line(error)})") from error
    replace_methods(model)
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "is_causal", True) is None:
        text.is_causal = True  # As in transformers' default attention. The masks of other kinds take null for false.
    served = TransformersModel(model, config, dtype)
    try:
        check_paged_equivalence(served, config, dtype=dtype, device=device)
    except CheckpointError:
        raise
    except Exception as error:  # The model's code may raise anything.
        raise CheckpointError(f"{config.architecture} fails on its first tokens: {first_line(error)}") from error
    if served.states is not None and served.states.by_token:
        _log.warning(
            "%s computes several tokens from an empty state only: chunks of a prompt after the first one are computed "
            "token by token; raise max_num_batched_tokens so that most prompts have one chunk",
            config.architecture,
        )
    return served


def _load(path: Path, config: TransformersConfig, dtype: torch.dtype, attention: str) -> tuple[Any, dict[str, Any]]:
    """Return transformers' model of `path` and the loading report. Raises any exception of transformers."""
    if config.quantization is not None:
        return load_dequantized(path, config.quantization, dtype=dtype, attention=attention)
    loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    return loaded


class TransformersModel(nn.Module):
    """A model of transformers as a `CausalLM`: its body computes hidden states, and its head the logits of some
    rows."""

    def __init__(self, model: nn.Module, config: TransformersConfig, dtype: torch.dtype) -> None:
        """Run `model` on a few tokens to find its attention modules. Keys and values are cached as `dtype`.

        Raises `CheckpointError` for a model that cannot be served.
        """
        super().__init__()
        self.model = model
        self._carried: torch.Tensor | None = None
        """Positions of the current pass with the lengths that they carry; None outside `forward`."""
        _follow_lengths(model, config.rope_context(config.max_model_len), lambda: self._carried)
        self._indexed = _indexed_caches(model, config.architecture)
        self.states = RecurrentStates.of(model)
        """The recurrent states of its layers; None if it has none."""
        if self.states is not None and self._indexed is not None:
            raise CheckpointError(
                f"{config.architecture} has recurrent states and an indexer of tokens, which the general route cannot "
                "serve together"
            )
        structure = _find_structure(model, config.architecture, dtype, self._indexed, self.states)
        self._calls = install(structure.attention)
        self._attention = [attention for calls in structure.attention.values() for attention in calls]
        self._body = [structure.body]
        """A list of one module, so that torch does not register the module and its weights a second time."""
        self._output_class = structure.output_class
        self._compute_body = structure.body.forward
        self._takes_positions = structure.takes_positions

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute the final hidden states. # 2 x [tokens] int64 -> [tokens, hidden_size]"""
        if self.states is None:
            caches = {} if self._indexed is None else self._indexed.served(without_lengths(positions))
            output = self._run_body(input_ids[None], positions[None], {"use_cache": False, **caches})
            return cast(torch.Tensor, output.last_hidden_state[0])
        metadata = get_forward_context().attn_metadata
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in self.states.parts():
            of_part = positions[part.tokens]
            with context_of_part(part, metadata, without_lengths(of_part)):
                output = self._run_body(input_ids[part.tokens], of_part, self.states.read(part))
                self.states.write(part, output)
            parts.append((part.tokens, output.last_hidden_state))
        hidden = parts[0][1].new_empty(len(input_ids), parts[0][1].shape[-1])
        for tokens, computed in parts:
            hidden[tokens] = computed
        return hidden

    def _run_body(self, input_ids: torch.Tensor, positions: torch.Tensor, arguments: dict[str, Any]) -> Any:
        """Return the body's output. # 2 x [B, n] int64"""
        if self._takes_positions:
            arguments["position_ids"] = without_lengths(positions)
        self._calls.restart()
        self._carried = positions.flatten()
        try:
            return self._body[0](input_ids=input_ids, **arguments)
        finally:
            self._carried = None

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the model's own forward pass with `hidden` in place of the body's output.

        This applies the model's own scales and caps of logits.
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
        specs += [] if self._indexed is None else list(self._indexed.index_specs.values())
        return specs + ([] if self.states is None else [self.states.spec])

    def linear_layers(self) -> dict[str, nn.Linear]:
        """Return the linear layers that may have LoRA adapters, by transformers' names.

        The head is excluded, since it computes only some tokens; projections of latents are excluded, since they also
        compute tokens of earlier steps.
        """
        excluded = {cast("Any", self.model).get_output_embeddings()}
        excluded |= {attention.kv_b for attention in self._attention if isinstance(attention, IndexedAttention)}
        layers = ((name, part) for name, part in self.model.named_modules() if isinstance(part, nn.Linear))
        return {name: layer for name, layer in layers if layer not in excluded}

    def reference_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute logits with transformers' own attention. # [sequences, n] -> [sequences, n, vocab_size]"""
        with using_attention(self.model, "eager"):
            output = self.model(input_ids=input_ids, use_cache=False)
        return cast(torch.Tensor, output.logits.float())


class _Structure(NamedTuple):
    """A model's structure, as found by a forward pass."""

    attention: dict[nn.Module, list[PagedAttention | IndexedAttention]]
    """By module, that of each call of the module in a pass."""
    body: nn.Module
    """The module that computes hidden states, which the model's own `forward` calls."""
    output_class: Callable[..., Any]
    """The class of the body's output."""
    takes_positions: bool


def _indexed_caches(model: nn.Module, architecture: str) -> IndexedCaches | None:
    """Return the caches of a model with indexed-attention layers, or None if it has no such layers."""
    text = cast("Any", model).config.get_text_config(decoder=True)
    return IndexedCaches(architecture) if INDEXED_LAYERS & set(getattr(text, "layer_types", None) or ()) else None


def _find_structure(
    model: nn.Module,
    architecture: str,
    dtype: torch.dtype,
    indexed: IndexedCaches | None,
    states: RecurrentStates | None,
) -> _Structure:
    """Run a few tokens and record which modules run. Raises `CheckpointError` for a model that cannot be served."""
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
            arguments = {"use_cache": False, **({} if indexed is None else indexed.watched(tokens))}
            if states is not None:
                arguments = states.watched()
            if "position_ids" in inspect.signature(model.forward).parameters:
                arguments["position_ids"] = tokens
            model(input_ids=tokens, **arguments)
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
    if not attention and states is None:
        raise _has_attention_of_its_own(architecture)
    inside = set(attention)
    bodies = [(module, output) for module, output in outermost if hasattr(output, "last_hidden_state")]
    if len(bodies) != 1 or not inside <= set(bodies[0][0].modules()):
        raise CheckpointError(f"{architecture} is not a body and a head, so the general route cannot serve it")
    body, output = bodies[0]
    takes_positions = "position_ids" in inspect.signature(body.forward).parameters
    if attention and not takes_positions:
        raise CheckpointError(
            f"{architecture} takes no position_ids (it counts positions from the start of a step), so the general "
            "route cannot serve it"
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in body.modules()):
        raise CheckpointError(
            f"{architecture} counts positions from pad_token_id + 1 and leaves out padding tokens, which the general "
            "route cannot serve"
        )
    if states is not None:
        states.record(output)
    return _Structure(attention, body, type(output), takes_positions)


def _follow_lengths(model: nn.Module, context: RopeContext | None, carried: Callable[[], torch.Tensor | None]) -> None:
    """Make rotary embeddings that depend on lengths use the length of each token's own sequence.

    transformers uses the largest position of a call for all of its tokens. `context`: how frequencies depend on
    lengths; None if served sequences are too short for other frequencies than the initial ones, which are then always
    used. `carried`: see `RotaryByLength`. Raises `CheckpointError` if the rope types of kinds of layers differ and one
    of them depends on lengths.
    """
    following: dict[nn.Module, RotaryByLength] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            kind = getattr(module, "rope_type", None)
            if isinstance(kind, dict):
                names = map(str, kind.values())
                if changing := sorted(each for each in names if "dynamic" in each or each == "longrope"):
                    raise CheckpointError(
                        f"rope type {changing[0]} by kind of layer changes with a step's longest sequence, which the "
                        "general route cannot serve"
                    )
            elif kind in ("dynamic", "longrope") and context is None:
                module.rope_type = "default"  # type: ignore[assignment]
            elif kind in ("dynamic", "longrope") and context is not None:
                follower = following.setdefault(module, RotaryByLength(module, context, carried))
                setattr(parent, name, follower)


def _has_attention_of_its_own(architecture: str) -> CheckpointError:
    return CheckpointError(
        f"{architecture} computes no attention through transformers' attention interface (it has its own, as models "
        "with ALiBi biases do), so the general route cannot serve it"
    )


def load_dequantized(
    path: Path, quantization: QuantizationConfig, *, dtype: torch.dtype, attention: str
) -> tuple[Any, dict[str, Any]]:
    """Load transformers' model of `path` with its quantised weights made dense; return it with the loading report.

    Raises `CheckpointError` for quantised tensors that do not fit one another, and any exception of transformers.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model_class = causal_model_class(config)
    with torch.device("meta"):
        empty = model_class(config)
    _reject_transposed_weights(empty, quantization)
    state = _dense_tensors(path, quantization, empty.state_dict().keys(), dtype)
    loaded: tuple[Any, dict[str, Any]] = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    return loaded


class _TakeOnce:
    """A tensor that can be read once, with the interface of a safetensors slice.

    transformers keeps references to all given tensors until the load ends. Reading drops this object's reference, so
    that the tensor of an expert is freed once it has been copied into the stack of experts.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    def __getitem__(self, _all: Any) -> torch.Tensor:
        assert self._tensor is not None
        tensor, self._tensor = self._tensor, None
        return tensor


def _dense_tensors(
    path: Path, quantization: QuantizationConfig, names: Container[str], dtype: torch.dtype
) -> dict[str, _TakeOnce]:
    """Return each tensor made dense, by its name in the checkpoint.

    `names`: names of the model's tensors, which differ from the checkpoint's for experts.
    """
    state: dict[str, _TakeOnce] = {}

    def is_wanted(name: str) -> bool:
        return name not in state and (name in names or not name.endswith(".bias"))

    dequantizer = Dequantizer(quantization, dtype, is_wanted)
    seen: dict[str, Path] = {}
    for file in weight_files(path):
        for name, tensor in dequantizer.dense(tensors_of_file(file, seen)):
            is_weight = name in names or name.endswith(".weight")  # Old checkpoints also hold 1-byte masks.
            if is_weight and tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
                raise CheckpointError(f"{name} in {file} is {tensor.dtype}, which the general route cannot make dense")
            state[name] = _TakeOnce(tensor)
    if incomplete := dequantizer.missing_names(dequantizer.incomplete()):
        raise CheckpointError(f"{path} lacks {some(incomplete)}, without which its weights cannot be read")
    if unexpected := dequantizer.unexpected_names():
        raise CheckpointError(f"{path} holds {some(unexpected)}, which its dense weights do not need")
    return state


def _require_padding_token(path: Path) -> None:
    """Raise `CheckpointError` if the padding token is outside the vocabulary; torch's error does not name the
    field."""
    fields = read_config(path)
    padding, vocab_size = fields.values.get("pad_token_id"), fields.values.get("vocab_size")
    if isinstance(padding, int) and isinstance(vocab_size, int) and not -vocab_size <= padding < vocab_size:
        raise fields.invalid("pad_token_id", f"a token of the vocabulary, below vocab_size, {vocab_size}")


def _reject_transposed_weights(model: torch.nn.Module, quantization: QuantizationConfig) -> None:
    """Raise `CheckpointError` if the model stores weights transposed, because a square one would be loaded wrongly
    without an error."""
    name = type(model).__name__
    if any(isinstance(module, Conv1D) for module in model.modules()):
        raise CheckpointError(f"{name} keeps its weights transposed, so the general route reads it dense only")
    every = quantization.global_quant_config
    if every is not None and every.storage == "mxfp4-experts" and name != "GptOssForCausalLM":
        raise CheckpointError(f"quant_method mxfp4 holds experts as GptOssForCausalLM has them; {name} has others")


def check_paged_equivalence(
    model: TransformersModel, config: TransformersConfig, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `CheckpointError` if sequences, batched in steps, give other logits than transformers' model, or NaN.

    This detects what the recorded attention calls do not show: a recurrent state, a convolution, or positions counted
    from the start of a step. transformers' model is computed twice, the second time with each module's result moved by
    up to one unit in the last digit. Errors must not exceed this change of logits: in sound models of 16 bits they are
    0.2 to 0.6 times as large. Roundings may change a token's experts, and then its logits altogether. So medians are
    compared, over the tokens of prefills, chunks and decodes.
    """
    length = sum(_STEPS[0])
    sequences = (torch.arange(length) * 7 + torch.arange(len(_STEPS))[:, None]) % config.vocab_size
    sequences = sequences.to(device)
    with torch.inference_mode():
        expected = model.reference_logits(sequences)
        if bool(expected.isnan().any()):
            raise CheckpointError(
                f"the logits of {config.architecture} are NaN in {str(dtype).removeprefix('torch.')}: a weight or a "
                "scale is NaN, or numbers overflow; download the checkpoint again or choose another dtype"
            )
        with _rounded_otherwise(model):
            accepted = _errors(model.reference_logits(sequences), expected).clamp_min(_TOLERANCE)
        errors = _errors(_in_steps(model, sequences, dtype, device), expected)
        if model.states is not None and not (errors <= _TOLERANCE).all():
            model.states.by_token = True
            by_token = _errors(_in_steps(model, sequences, dtype, device), expected)
            # `not <=` also holds for NaN.
            model.states.by_token = not (errors <= (_FACTOR_BY_TOKEN * by_token).clamp_min(_TOLERANCE)).all()
            errors = by_token if model.states.by_token else errors
        if not (errors <= accepted).all():
            worst = (errors / accepted).argmax()
            raise CheckpointError(
                f"{config.architecture} gives other logits in a batch than alone (by {errors[worst]:.1%}, where "
                f"rounding explains {accepted[worst]:.1%}): {_cause(model)}"
            )


@contextmanager
def _rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Within the context, each module's result is moved at random by up to one unit in the last digit."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)

    def move(_module: nn.Module, _args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        unit = torch.finfo(output.dtype).eps
        factors = 1 + unit * (2 * torch.rand(output.shape, generator=generator, device=device) - 1)
        return (output * factors).to(output.dtype)

    hooks = [module.register_forward_hook(move) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cause(model: nn.Module) -> str:
    """Explain why a model gives other logits in a batch than alone."""
    every = (tuple(getattr(part, "time_step_limit", _NO_LIMIT)) for part in model.modules())
    if limit := next((each for each in every if each != _NO_LIMIT), None):
        return (
            f"transformers limits its time steps to {limit[0]} to {limit[1]} in prompts but not in decodes; serve it "
            "with model_impl kaon"
        )
    return (
        "it computes more across tokens than causal attention and the states that it returns, which the general route "
        "cannot serve"
    )


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the median errors over the tokens of prefills, of chunks and of decodes; NaN if one is NaN.

    Errors are relative to the median spread of a token's logits. # 2 x [sequences, length, vocab_size] -> [3]
    """
    spread = expected - expected.mean(-1, keepdim=True)
    errors = (found - expected).norm(dim=-1) / spread.norm(dim=-1).median()
    kinds = [
        [0 if not step else 1 + (count == 1) for step, count in enumerate(counts) for _ in range(count)]
        for counts in _STEPS
    ]
    kind = torch.tensor(kinds, device=errors.device)
    return torch.stack([errors[kind == each].median() for each in range(3)])


def _in_steps(
    model: TransformersModel, sequences: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the logits of each sequence, computed in `_STEPS`.

    # [sequences, length] -> [sequences, length, vocab_size]
    """
    backend = select_backend(device)
    caches: dict[str, LayerCache] = {}
    for spec in model.kv_cache_layers():
        if isinstance(spec, StateCacheSpec):
            states = zip(spec.shapes, spec.dtypes, strict=True)
            own = tuple(torch.zeros(len(sequences), *shape, dtype=kind, device=device) for shape, kind in states)
            caches[spec.name] = StateCache(own)
            continue
        if isinstance(spec, VectorCacheSpec):
            vectors = torch.zeros(len(sequences), _BLOCK_SIZE, spec.dim, dtype=dtype, device=device)
            caches[spec.name] = VectorCache(vectors)
            continue
        assert isinstance(spec, KVCacheSpec)
        shape = backend.kv_cache_shape(len(sequences), _BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        caches[spec.name] = KVCacheTensor(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    starts = np.zeros(len(_STEPS), dtype=np.int64)
    for lengths in np.array(_STEPS).T:
        order = np.argsort(lengths != 1, kind="stable")  # Decodes come first.
        counts, ends = lengths[order], (starts + lengths)[order]
        positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
        rows = np.repeat(order, counts)
        metadata = backend.build_metadata(
            AttentionBatch(
                query_lens=counts,
                seq_lens=ends,
                block_tables=order[:, None].astype(np.int32),
                slot_mapping=positions + rows * _BLOCK_SIZE,
                num_decodes=int((counts == 1).sum()),
                states=order if model.states is not None else None,
            )
        )
        at = torch.from_numpy(positions).to(device)
        context = Context(positions=at, is_prefill=True, batch_size=len(order))
        with forward_context(metadata, context, kv_cache_data=caches):
            hidden = model(sequences[torch.from_numpy(rows).to(device), at], at)
        for sequence, logits in zip(order, torch.split(model.compute_logits(hidden), counts.tolist()), strict=True):
            parts[sequence].append(logits)
        starts += lengths
    return torch.stack([torch.cat(part) for part in parts])
