"""`load_model`: builds a model and fills it from the checkpoint's safetensors files. Called by the model runner.

`load_draft_head` does the same with a model that drafts for another one.

In order: build the model without reading; choose the form in which each weight is kept (packed, quantised or dense);
read the files into it; complete it. Every parameter must be filled and every tensor used, or a `CheckpointError` names
those that were not.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from tqdm import tqdm

from models.architectures.config import CheckpointConfig, ModelConfig, text_name
from models.architectures.encoder_config import EncoderConfig
from models.architectures.registry import ARCHITECTURES, ENCODERS
from models.config.weight_files import some, weight_files
from models.errors import CheckpointError, first_line
from models.layers.attention import Attention
from models.layers.base import CausalLM, DraftLM
from models.layers.linear import ParallelLinear, VocabParallelEmbedding, can_pack, pack_filled_products
from models.layers.mla import MLAAttention
from models.layers.moe import FusedMoE, is_plain_stack
from models.layers.parameter import (
    SourceNames,
    WeightPart,
    WeightShapeError,
    checkpoint_name,
    is_product,
    keep_codes,
    pack_products,
    packed_of,
    packed_parts,
    products_without_memory,
    sources_of,
    take_memory,
    weight_bytes,
    weight_loader_of,
)
from models.loading.checkpoint import TransformersConfig, tensors_of_file
from models.loading.packs import PackCache, key_of
from models.ops import aiter, triton
from models.ops.cpu import runtime
from models.ops.stored_weight import finish_stored, keep_quantized
from models.ops.weight_formats import RUN
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel
from models.quantization.config import LayerQuantConfig, QuantizationConfig, Rounding
from models.quantization.dequantize import Dequantizer, ExpertNames
from models.quantization.layouts import layout_of

_log = logging.getLogger(__name__)

_EXPERTS = ".experts."
_HEADS = (
    "lm_head.",
    "score.",
    "classifier.",
    "cls.",
    "head.",
    "decoder.",
    "pooler.",
    "bert.pooler.",
    "roberta.pooler.",
)
"""Prefixes of the tensors of heads, which a body that only pools does not load."""
_NO_WEIGHTS = (".position_ids", ".token_type_ids")
"""Endings of the names of buffers that old checkpoints contain and the model does not need."""
_OLD_NORM = re.compile(r"\.LayerNorm\.(gamma|beta)$")
_OLD_NORMS = {"gamma": "weight", "beta": "bias"}
"""Names of a norm's parameters in checkpoints converted from TensorFlow, and the model's names."""
_BAR_AFTER_SECONDS = 1.0
"""Delay after which the progress bar is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of loading a target or its draft model."""

    dtype: torch.dtype
    device: torch.device
    progress: bool
    """Whether to show a bar of files on stderr."""
    parallel: TensorParallel = SINGLE_RANK
    available_bytes: int | None = None
    """Limit of the weights' bytes; None if only the device's allocator limits them."""
    rounding: Rounding | None = None
    """The rounding of weights while they are read, which needs the CPU operators."""
    packs: PackCache | None = None
    """The cache of the CPU operators' packed weights, which later starts reuse."""
    is_compiled: bool = False
    """Whether torch compiles the layers. Its compiler reads dense weights, and raises for products by packed ones."""

    @property
    def has_operators(self) -> bool:
        """Whether the CPU operators compute the model."""
        return self.dtype is torch.bfloat16 and self.device.type == "cpu" and runtime.active()


def load_model(path: Path, config: CheckpointConfig, *, generates: bool = True, **options: Any) -> CausalLM:
    """Load this rank's shard of the model in the checkpoint directory `path`. `options`: fields of `LoadOptions`.

    `generates`: False for a model that only pools prompts; its language-model head, if any, is not loaded.
    Raises `CheckpointError` for a checkpoint that is damaged, does not fit, or is not the model of `config`.
    """
    return load_with(LoadOptions(**options), path, config, generates=generates)


def load_with(options: LoadOptions, path: Path, config: CheckpointConfig, *, generates: bool = True) -> CausalLM:
    """`load_model` with the options as one object."""
    parallel = options.parallel
    if isinstance(config, TransformersConfig):
        from models.loading.transformers_model import load_transformers_model

        _require_one_rank(config, parallel)
        return load_transformers_model(
            path, config, dtype=options.dtype, device=options.device, progress=options.progress
        )
    assert isinstance(config, ModelConfig | EncoderConfig)

    def make() -> nn.Module:
        model = make_model(config, parallel)
        if not generates and hasattr(model, "lm_head"):
            del model.lm_head
        if parallel.experts is not None and not any(isinstance(module, FusedMoE) for module in model.modules()):
            raise CheckpointError(
                f"enable_expert_parallel is set, but {config.architecture} of {path} has no experts; leave it out"
            )
        return model

    if isinstance(config, ModelConfig) and config.is_text_part:
        _log.info("%s: the text part of the checkpoint is loaded; images and sounds are not served", path)
    names = checkpoint_names(config)
    model = _load(options, path, config, make, names.is_ignored, names.rename, is_body=not generates)
    return cast(CausalLM, model)


class CheckpointNames(NamedTuple):
    """How a checkpoint's tensor names relate to the model's."""

    is_ignored: Callable[[str], bool]
    """Whether the model does not load the checkpoint tensor of a name."""
    rename: Callable[[str], str]
    """Maps a checkpoint tensor's name to the model's."""


def checkpoint_names(config: ModelConfig | EncoderConfig) -> CheckpointNames:
    """Return the name mapping of a language model or encoder."""
    ignored = _ignored_prefixes(config)
    is_text_part = isinstance(config, ModelConfig) and config.is_text_part

    def is_ignored(name: str) -> bool:
        own = text_name(name) if is_text_part else name
        return own is None or own.startswith(ignored)

    return CheckpointNames(is_ignored, _renaming(config))


def load_draft_head(
    options: LoadOptions,
    path: Path,
    config: ModelConfig,
    make: Callable[[], DraftLM],
    is_ignored: Callable[[str], bool],
    rename: Callable[[str], str] = lambda name: name,
) -> DraftLM:
    """Build a drafter with `make`, and fill it from the tensors of `path` that are not ignored.

    `rename`: maps a checkpoint tensor's name to the model's. Raises as `load_model` does.
    """
    return cast(DraftLM, _load(options, path, config, make, is_ignored, rename))


def _load(
    options: LoadOptions,
    path: Path,
    config: ModelConfig | EncoderConfig,
    make: Callable[[], nn.Module],
    is_ignored: Callable[[str], bool],
    rename: Callable[[str], str] = lambda name: name,
    *,
    is_body: bool = False,
) -> nn.Module:
    files = weight_files(path)
    dtype, device, rounding, parallel = options.dtype, options.device, options.rounding, options.parallel
    assert options.has_operators or rounding is None, "weights are rounded for the CPU operators only"
    may_keep = config.quantization is not None and triton.takes("linear")
    try:
        with default_dtype(dtype), device, products_without_memory() if may_keep else nullcontext():
            model = make()
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the memory of device {device} ({first_line(error)})") from error
    if options.has_operators:
        pack_products(model, rounding)
    wanted = wanted_tensors(model)
    kept: frozenset[str] = frozenset()
    if may_keep:
        # The pairwise exchange of experts computes its (token, expert) pairs by torch.
        has_pairs = parallel.experts is not None and parallel.experts.exchange is not parallel.token_exchange
        kept = _keep_quantized(wanted, config.quantization, may_stack=triton.takes("moe") and not has_pairs)
    elif options.has_operators and config.quantization is not None:
        kept = _keep_codes(model, wanted, config.quantization, rounding)
    _require_memory(model, options.available_bytes, path)
    key = None
    if options.has_operators and options.packs is not None:
        experts = parallel.experts and (parallel.experts.num_replicas, parallel.experts.replica)
        described = (path.resolve(), config, rounding, sorted(kept), parallel.rank, parallel.size, experts, is_body)
        key = key_of(model, [*files, path / "config.json"], *map(repr, described))
        if options.packs.restore(model, key):
            return model.eval()
    take_memory(model.parameters())
    names = frozenset(wanted) if is_body else None
    has_cache_scales = _read(
        path,
        files,
        model,
        config,
        wanted,
        kept,
        is_ignored,
        rename,
        dtype=dtype,
        progress=options.progress,
        body_names=names,
    )
    finish_stored(model.parameters())
    if options.has_operators:
        for module in model.modules():
            if isinstance(module, MLAAttention):
                module.pack_heads()
    has_kernels = runtime.active() or triton.active()
    if device.type == "cpu" and not has_kernels and not options.is_compiled and can_pack(dtype):
        pack_filled_products(model)
    if aiter.takes("moe"):
        _shuffle_experts(model)
    if key is not None and options.packs is not None and not has_cache_scales:
        options.packs.keep(model, key)
    return model.eval()


def make_model(config: ModelConfig | EncoderConfig, parallel: TensorParallel = SINGLE_RANK) -> nn.Module:
    """Build the model, unfilled, on the default device in the default dtype."""
    return _model_class(config)(config, parallel)


def _model_class(config: ModelConfig | EncoderConfig) -> type[nn.Module]:
    if isinstance(config, EncoderConfig):
        return ENCODERS[config.architecture]
    return ARCHITECTURES[config.architecture].model_class


def _renaming(config: ModelConfig | EncoderConfig) -> Callable[[str], str]:
    """Return the function from a checkpoint tensor's name to the model's."""
    if isinstance(config, ModelConfig):
        own = ARCHITECTURES[config.architecture].facts.rename or (lambda name: name)
        return (lambda name: own(text_name(name) or name)) if config.is_text_part else own
    return lambda name: name


def _require_one_rank(config: CheckpointConfig, parallel: TensorParallel) -> None:
    """Raise `CheckpointError` if a model of transformers would be sharded over several ranks."""
    if parallel.experts is not None:
        raise CheckpointError(
            f"enable_expert_parallel is set, but {config.architecture} runs by transformers' own code, whose experts "
            "cannot be spread; leave it out"
        )
    if parallel.size > 1:
        raise CheckpointError(
            f"tensor_parallel_size is {parallel.size}, but {config.architecture} runs by transformers' own code, on "
            "one device; set it to 1"
        )


def _read(
    path: Path,
    files: list[Path],
    model: nn.Module,
    config: ModelConfig | EncoderConfig,
    wanted: dict[str, "Target"],
    kept: frozenset[str],
    is_ignored: Callable[[str], bool],
    rename: Callable[[str], str],
    *,
    dtype: torch.dtype,
    progress: bool,
    body_names: frozenset[str] | None,
) -> bool:
    """Fill the model. Return whether the checkpoint also has scales of the KV cache.

    `wanted`: the tensors to load, removed as they are read. `kept`: names of weights that stay quantised.
    `body_names`: the tensors of a model that only pools prompts, whose checkpoint may have another prefix and
    additional heads. Raises `CheckpointError` for tensors that are missing, damaged or unexpected.
    """
    is_remote = _remote_experts(model)
    dequantizer = Dequantizer(
        config.quantization, dtype, wanted.__contains__, partial(expert_names, wanted), kept.__contains__
    )
    bar = tqdm(
        files, desc="Loading weights", unit="file", file=sys.stderr, delay=_BAR_AFTER_SECONDS, disable=not progress
    )
    seen: dict[str, Path] = {}
    unexpected: list[str] = []
    for file in bar:
        found = tensors_of_file(file, seen, lambda name: is_ignored(name) or is_remote(rename(name)))
        tensors: Iterator[tuple[str, torch.Tensor]] = ((rename(name), tensor) for name, tensor in found)
        if body_names is not None:
            tensors = _of_body(tensors, body_names)
        for name, tensor in dequantizer.dense(tensors):
            target = wanted.pop(name, None)
            if target is not None:
                _fill(target, tensor, name, file)
                for rival in target.rivals:
                    wanted.pop(rival, None)
            # If a model has no shared experts, transformers saves their weights as tensors without elements.
            elif tensor.numel() and not _is_redundant(name, config):
                unexpected.append(name)
    for name in list(filter(is_remote, wanted)):
        del wanted[name]
    if missing := [name for name, target in wanted.items() if not target.is_alternative_to(wanted)]:
        lacking = some(dequantizer.missing_names(missing))
        raise CheckpointError(f"{path} lacks {lacking}, which {config.architecture} needs")
    if dequantizer.made_dense and triton.takes("linear"):
        forms = "; ".join(f"{count} in {form}" for form, count in dequantizer.made_dense.items())
        _log.warning("Quantised weights are made dense, which takes two to four times their memory: %s", forms)
    scales = dequantizer.kv_scales
    has_scales = bool(scales)
    for module in model.modules():
        if isinstance(module, Attention | MLAAttention) and module.layer_name in scales:
            layer = scales.pop(module.layer_name)
            module.scale_cache(layer.k, layer.v)
    unexpected += [name for layer in scales.values() for name in layer.names]
    if unexpected := unexpected + dequantizer.unexpected_names():
        raise CheckpointError(f"{path} holds {some(unexpected)}, which {config.architecture} does not have")
    return has_scales


def _of_body(tensors: Iterator[tuple[str, torch.Tensor]], names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a body by the model's names, and skip those of heads.

    In the checkpoint, a body has a prefix if it was saved as a part of a model, and none if it was saved alone.
    """
    for name, tensor in tensors:
        name = _OLD_NORM.sub(lambda found: f".LayerNorm.{_OLD_NORMS[found[1]]}", name)
        spellings = (name, f"model.{name}", f"transformer.{name}", name.partition(".")[2])
        known = next((each for each in spellings if each in names), None)
        if known is not None or not (name.startswith(_HEADS) or name.endswith(_NO_WEIGHTS)):
            yield known or name, tensor


def _remote_experts(model: nn.Module) -> Callable[[str], bool]:
    """Return the predicate whether a checkpoint tensor belongs to an expert that another rank holds."""
    prefixes: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            base = checkpoint_name(f"{name}.w13", model).rpartition(".")[0]
            prefixes |= {f"{base}.{expert}" for expert in set(range(module.num_experts)) - set(module.local_experts)}

    def is_remote(name: str) -> bool:
        base, separator, rest = name.partition(_EXPERTS)
        return f"{base}{separator}{rest.partition('.')[0]}" in prefixes

    return is_remote if prefixes else lambda _name: False


def _shuffle_experts(model: nn.Module) -> None:
    """Reorder the expert weights of a filled model for aiter, in the layers that aiter supports."""
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    rest = sum(not layer.shuffle() for layer in layers)
    if rest:
        _log.warning(
            "%d of %d layers of experts are not computed by aiter, but by Triton: they have biases, another "
            "activation than SwiGLU, other sizes than multiples of 32, or are quantised or spread in another way",
            rest,
            len(layers),
        )


def _require_memory(model: nn.Module, available: int | None, path: Path) -> None:
    """Raise `CheckpointError` if the weights do not fit the memory.

    Allocation succeeding is no proof on a host, which commits memory only when weights are filled.
    """
    needed = sum(weight_bytes(parameter) for parameter in model.parameters())
    if available is not None and needed > available:
        raise CheckpointError(
            f"{path} does not fit the memory: its weights take {needed / 2**30:.2f} GiB, and {available / 2**30:.2f} "
            "GiB are available; end other programs, serve a smaller model, or store its weights in fewer bits "
            "(quantization)"
        )


class Target(NamedTuple):
    """The parameter that a checkpoint tensor fills."""

    parameter: nn.Parameter
    shard: WeightPart
    rivals: tuple[str, ...] = ()
    """Names of the parameter's tensors under alternative namings; a checkpoint uses one naming."""
    is_first_naming: bool = True

    def is_alternative_to(self, missing: Mapping[str, "Target"]) -> bool:
        """Whether an error about `missing` should omit this tensor, since it names the parameter's tensors by another
        naming."""
        return not self.is_first_naming and any(rival in missing for rival in self.rivals)


def wanted_tensors(model: nn.Module) -> dict[str, Target]:
    """Map the name of each checkpoint tensor to the parameter, and the part of it, that the tensor fills."""
    parts = packed_parts(model)
    wanted: dict[str, Target] = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = checkpoint_name(name, model).rpartition(".")
        parent, _, kind = module.rpartition(".")
        if spellings := sources_of(parameter):
            wanted |= _in_any_spelling(parameter, parent, spellings)
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        # A layer with the name of a packed module may also be filled by a single tensor of that name.
        of_layer = layer.parts if kind in parts and isinstance(layer, ParallelLinear) else {}
        if packed := [(source, shard) for source, shard in parts.get(kind, ()) if shard in of_layer]:
            wanted |= {f"{parent}.{source}.{leaf}": Target(parameter, shard) for source, shard in packed}
        else:
            wanted[f"{module}.{leaf}"] = Target(parameter, None)
    return wanted


def _keep_quantized(
    wanted: Mapping[str, Target], quantization: QuantizationConfig | None, *, may_stack: bool
) -> frozenset[str]:
    """Prepare the parameters whose quantised weights GPU kernels read as stored; return those weights' names.

    `may_stack`: whether stacks of experts may stay quantised.
    """
    assert quantization is not None
    names: dict[nn.Parameter, list[str]] = {}
    for name, target in wanted.items():
        if is_product(target.parameter) and (may_stack or target.parameter.dim() == 2):
            names.setdefault(target.parameter, []).append(name)
    staying: list[str] = []
    for parameter, sources in names.items():
        layers = [quantization.for_layer(name.removesuffix(".weight")) for name in sources]
        if parameter.dim() == 3:
            # The last name is that of the whole stack.
            stack = layers.pop()
            if stack is not None and stack.storage == "mxfp4-experts":
                keep_quantized(parameter)
                staying.append(sources[-1])
                continue
        # Tensors without a kernel are made dense. `layers` has no entry for the stack's own name, the last one.
        kept = [
            name
            for name, layer in zip(sources, layers, strict=False)
            if layer is not None and layout_of(layer).has_kernel
        ]
        if kept:
            keep_quantized(parameter)
            staying += kept
    return frozenset(staying)


def _keep_codes(
    model: nn.Module, wanted: Mapping[str, Target], quantization: QuantizationConfig, rounding: Rounding | None
) -> frozenset[str]:
    """Prepare the parameters whose quantised weights the CPU operators read as stored; return those weights' names.

    Embeddings, which are read by row, and heads, which have other operators, are made dense. With a `rounding`, a
    parameter keeps its packed form: it takes the checkpoint's codes if they have that form, and else rounds dense
    rows.
    """
    read_otherwise = {id(module.weight) for module in model.modules() if isinstance(module, VocabParallelEmbedding)}
    names: dict[nn.Parameter, list[str]] = {}
    for name, target in wanted.items():
        if packed_of(target.parameter) is not None and id(target.parameter) not in read_otherwise:
            names.setdefault(target.parameter, []).append(name)
    staying: list[str] = []
    for parameter, sources in names.items():
        layers = [quantization.for_layer(name.removesuffix(".weight")) for name in sources]
        if parameter.dim() == 3 and len(sources) > 1:
            # A stack of experts. The last name is that of the whole stack.
            stack, stack_name, sources = layers.pop(), sources[-1], sources[:-1]
            if _stays_stacked(parameter, stack) and rounding is None:
                keep_codes(parameter, 4)
                staying.append(stack_name)
                continue
        if all(layer is not None and layout_of(layer).has_codes for layer in layers):
            if rounding is None:
                keep_codes(parameter, max(layer.bits for layer in layers if layer is not None))
            staying += sources
    return frozenset(staying)


def _stays_stacked(parameter: nn.Parameter, stack: LayerQuantConfig | None) -> bool:
    """Whether this rank's shard of a stack of experts that the checkpoint stores as one MXFP4 tensor can stay
    quantised."""
    return stack is not None and stack.storage == "mxfp4-experts" and parameter.shape[2] % (2 * RUN) == 0


def _in_any_spelling(parameter: nn.Parameter, parent: str, spellings: tuple[SourceNames, ...]) -> dict[str, Target]:
    """Map the names of the checkpoint tensors that may fill the parameter, in all namings, to their targets."""
    named = [{f"{parent}.{name}": shard for name, shard in spelling.items()} for spelling in spellings]
    targets = {}
    for spelling in named:
        rivals = tuple(name for other in named if other is not spelling for name in other)
        for name, shard in spelling.items():
            targets[name] = Target(parameter, shard, rivals, spelling is named[0])
    return targets


def expert_names(wanted: Mapping[str, Target], stack: str) -> ExpertNames:
    """Return the names of the single experts' tensors that the stacked tensor `stack` replaces; empty if it is no
    stack, or if its experts are in another layout than alone."""
    rivals = wanted[stack].rivals if stack in wanted and is_plain_stack(wanted[stack].shard) else ()
    return {shard: name for name in rivals if name in wanted and isinstance(shard := wanted[name].shard, tuple)}


def _fill(target: Target, tensor: torch.Tensor, name: str, file: Path) -> None:
    is_number = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    if is_number != target.parameter.is_floating_point():
        raise CheckpointError(
            f"{name} in {file} is {tensor.dtype}, but config.json names no quantisation of it; use a checkpoint whose "
            "quantization_config says how its weights are stored"
        )
    try:
        weight_loader_of(target.parameter)(target.parameter, tensor, target.shard)
    except WeightShapeError as error:
        raise CheckpointError(f"{name} in {file} has {error}, by config.json") from error


_MTP_PREFIXES = ("mtp.", "model.mtp.", "model.mtp_")
"""Prefixes of multi-token-prediction tensors, other than those of layers past the last one."""


def _ignored_prefixes(config: ModelConfig | EncoderConfig) -> tuple[str, ...]:
    """Return the prefixes of tensors that are not loaded: unused ones, and those of multi-token-prediction layers."""
    if isinstance(config, EncoderConfig):
        return ()
    first, count = config.num_hidden_layers, config.fields.integer("num_nextn_predict_layers", 0, minimum=0)
    past = (f"model.layers.{layer}." for layer in range(first, first + count))
    return (*past, *_MTP_PREFIXES, *ARCHITECTURES[config.architecture].facts.unread(config.fields))


def _is_redundant(name: str, config: ModelConfig | EncoderConfig) -> bool:
    """Whether a tensor is redundant: rotary frequencies, which are computed, or a copy of the tied embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the context, `dtype` is torch's default dtype."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
