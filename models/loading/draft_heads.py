"""Loads MTP layers and EAGLE heads: the methods `mtp`, `eagle` and `eagle3` of `DRAFTERS`.

A drafter's checkpoint may contain copies of the target's embedding and head. Tensors that are equal to the target's
are not loaded; the drafter then uses the target's weights.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import cast

import torch

from models.architectures.config import ModelConfig
from models.architectures.draft_head import TargetWeights
from models.architectures.eagle import Eagle, Eagle3, Eagle3Shape
from models.architectures.llama import LlamaForCausalLM
from models.architectures.mtp import MTP_OF, DeepseekV4MTP, Qwen3NextMTP
from models.architectures.registry import ARCHITECTURES, DRAFTERS
from models.config.weight_files import tensor_files
from models.demo import CHECKPOINT_DIR, DRAFT_HEAD_DIR
from models.errors import CheckpointError
from models.layers.base import DraftLM
from models.loading.checkpoint import read_tensor
from models.loading.drafters import DraftedModel
from models.loading.loader import load_draft_head

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOKEN_MAP, _IS_DRAFTED = "d2t", "t2d"


@DRAFTERS.register("mtp")
def load_mtp(target: DraftedModel, path: Path | None) -> DraftLM:
    """Load the first multi-token-prediction layer of the target's own checkpoint."""
    if path is not None:
        raise CheckpointError(
            f"speculative_model is {path}, but speculative_method is mtp, whose layers are in the model's own "
            "checkpoint; leave it out"
        )
    config, path = target.config, target.path
    if config.architecture not in MTP_OF:
        raise CheckpointError(
            f"speculative_method is mtp, but {config.architecture} has no layers of multi-token prediction here; it "
            f"must be one of {', '.join(MTP_OF)}"
        )
    model_class = MTP_OF[config.architecture]
    if model_class is DeepseekV4MTP:
        return _load_v4(target, path, config)
    is_named = issubclass(model_class, Qwen3NextMTP)
    prefix = "mtp." if is_named else f"model.layers.{config.num_hidden_layers}."
    files = tensor_files(path)
    if not any(name.startswith(prefix) for name in files):
        raise CheckpointError(
            f"speculative_method is mtp, but {path} holds no tensors {prefix}*, which predict further tokens; choose "
            "a checkpoint that was saved with them, or another method"
        )
    own = {_EMBEDDING: f"{prefix}embed_tokens.weight", _HEAD: f"{prefix}shared_head.head.weight"}
    weights = _shared(target, files, own)
    unused = _unused(weights, own)
    return load_draft_head(
        target.options,
        path,
        config,
        lambda: model_class(config, weights, target.options.parallel),
        lambda name: not name.startswith(prefix) or name in unused,
    )


def _load_v4(target: DraftedModel, path: Path, config: ModelConfig) -> DraftLM:
    prefix, model = "mtp.0.", cast(LlamaForCausalLM, target.model)
    copies = (f"{prefix}emb.", f"{prefix}head.")
    facts_name = ARCHITECTURES[config.architecture].facts.rename
    assert facts_name is not None
    if not any(name.startswith(prefix) for name in tensor_files(path)):
        raise CheckpointError(
            f"speculative_method is mtp, but {path} holds no tensors {prefix}*, which predict further tokens; choose "
            "a checkpoint that was saved with them, or another method"
        )
    return load_draft_head(
        target.options,
        path,
        config,
        lambda: DeepseekV4MTP(config, TargetWeights(model.model.embed_tokens, model.lm_head), target.options.parallel),
        lambda name: not name.startswith(prefix) or name.startswith(copies),
        lambda name: facts_name(name).removeprefix("model.").replace(".model.hc_head.", ".hc_head."),
    )


@DRAFTERS.register("eagle")
def load_eagle(target: DraftedModel, path: Path | None) -> DraftLM:
    """Load an EAGLE head, which must have the target's hidden size."""
    path, config = _eagle_config(target, path, "eagle")
    if config.hidden_size != target.config.hidden_size:
        raise CheckpointError(
            f"hidden_size of {config.fields.where} is {config.hidden_size}, but the model's is "
            f"{target.config.hidden_size}; choose an EAGLE head that was trained for it"
        )
    files = tensor_files(path)
    rename = _without_prefix
    names = {rename(name): file for name, file in files.items()}
    if "fc.weight" not in names:
        raise CheckpointError(
            f"speculative_method is eagle, but {path} has no tensor fc.weight; name the directory of an EAGLE head, "
            "or set speculative_method to draft for a language model"
        )
    weights = _shared(target, files, _own_names(files))
    unused = _unused(weights, _own_names(files))
    return load_draft_head(
        target.options,
        path,
        config,
        partial(Eagle, config, weights, target.options.parallel, has_bias="fc.bias" in names),
        unused.__contains__,
        rename,
    )


@DRAFTERS.register("eagle3")
def load_eagle3(target: DraftedModel, path: Path | None) -> DraftLM:
    """Load an EAGLE-3 head."""
    path, config = _eagle_config(target, path, "eagle3")
    if config.num_hidden_layers != 1:
        raise config.fields.invalid("num_hidden_layers", "1, as of EAGLE-3 heads")
    shape = _eagle3_shape(target, config)
    files = tensor_files(path)
    own = _own_names(files)
    weights = _shared(target, files, own)
    if weights.embed_tokens is not None and config.hidden_size != target.config.hidden_size:
        raise CheckpointError(
            f"{path} has no tensor embed_tokens.weight, and the model's has {target.config.hidden_size} features "
            f"where hidden_size of {config.fields.where} is {config.hidden_size}; choose a head trained for it"
        )
    if weights.lm_head is not None and shape.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{path} has no tensor {_HEAD}, which draft_vocab_size {shape.draft_vocab_size} needs; download the "
            "checkpoint again"
        )
    token_map = _token_map(path, files, config, shape.draft_vocab_size)
    unused = {*_unused(weights, own), *(name for name in files if _without_prefix(name) in (_TOKEN_MAP, _IS_DRAFTED))}
    return load_draft_head(
        target.options,
        path,
        config,
        partial(Eagle3, config, weights, shape, token_map, target.options.parallel),
        unused.__contains__,
        _eagle3_name,
    )


def _eagle_config(target: DraftedModel, path: Path | None, method: str) -> tuple[Path, ModelConfig]:
    """Return the directory and the config of an EAGLE head; `max_model_len` is set to the target's.

    Without `path`, the embedded model uses its embedded EAGLE head.
    """
    if path is None and target.path == CHECKPOINT_DIR and method == "eagle":
        path = DRAFT_HEAD_DIR
    if path is None:
        raise CheckpointError(
            f"speculative_method is {method}, which needs a head; set speculative_model to its directory"
        )
    config = ModelConfig.from_checkpoint(path, "LlamaForCausalLM")
    if config.vocab_size != target.config.vocab_size:
        raise CheckpointError(
            f"vocab_size of {config.fields.where} is {config.vocab_size}, but the model's is "
            f"{target.config.vocab_size}; choose a head that was trained for it"
        )
    # A head reads the target's hidden states, so its positions are those of the target whatever its config says.
    return path, dataclasses.replace(config, max_model_len=target.config.max_model_len)


def _eagle3_shape(target: DraftedModel, config: ModelConfig) -> Eagle3Shape:
    fields, num_layers = config.fields, target.config.num_hidden_layers
    section = fields.section("eagle_config")
    name = "eagle_aux_hidden_state_layer_ids"
    if fields.has(name):
        where, layers = fields, fields.integers(name)
    elif section is not None and section.has(name):
        # `eagle_config` numbers the layers whose output is read; here the layers whose input is read are numbered.
        where, layers = section, tuple(layer + 1 for layer in section.integers(name))
    else:
        where, layers = fields, (2, num_layers // 2, num_layers - 3)
    if section is not None and not section.boolean("use_aux_hidden_state", True):
        layers = ()
    elif len(layers) != 3 or not all(0 <= layer <= num_layers for layer in layers):
        raise where.invalid(name, f"three layers of the model, which has {num_layers}")
    size = fields.integer("target_hidden_size", config.hidden_size)
    if size != target.config.hidden_size:
        named = "target_hidden_size" if fields.has("target_hidden_size") else "hidden_size"
        raise CheckpointError(
            f"{named} of {fields.where} is {size}, but the model's hidden_size is {target.config.hidden_size}; choose "
            "an EAGLE-3 head that was trained for it"
        )
    return Eagle3Shape(
        size,
        layers,
        fields.integer("draft_vocab_size", config.vocab_size, maximum=config.vocab_size),
        fields.boolean("norm_before_residual", False),
    )


def _token_map(path: Path, files: dict[str, Path], config: ModelConfig, size: int) -> torch.Tensor | None:
    """Return the target's token id of each id of the draft vocabulary, or None if both vocabularies are equal.

    The checkpoint's tensor `d2t` holds the difference of the two ids. # [size] int64
    """
    name = next((name for name in files if _without_prefix(name) == _TOKEN_MAP), None)
    if name is None:
        if size == config.vocab_size:
            return None
        raise CheckpointError(
            f"{path} has no tensor {_TOKEN_MAP}, which draft_vocab_size {size} of a vocabulary of {config.vocab_size} "
            "needs; download the checkpoint again"
        )
    distances = read_tensor(files[name], name)
    are_integers = not (distances.is_floating_point() or distances.is_complex() or distances.dtype is torch.bool)
    if distances.shape != (size,) or not are_integers:
        raise CheckpointError(
            f"{name} in {files[name]} is {distances.dtype} of shape {list(distances.shape)}; it must be integers of "
            f"shape [{size}], by draft_vocab_size"
        )
    tokens = distances.long() + torch.arange(size)
    if int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size or len(set(tokens.tolist())) != size:
        raise CheckpointError(
            f"{name} in {files[name]} maps drafts to tokens outside the vocabulary of {config.vocab_size}, or two to "
            "one; download the checkpoint again"
        )
    return tokens


def _shared(target: DraftedModel, files: dict[str, Path], own: dict[str, str]) -> TargetWeights:
    """Return the target's embedding and head, each if `files` lack the tensor or hold an equal one, else None.

    `own`: maps the target's names of the embedding and the head to the drafter's.
    """
    model = cast(LlamaForCausalLM, target.model)
    targets = tensor_files(target.path)
    names = {_EMBEDDING: _EMBEDDING, _HEAD: _HEAD if _HEAD in targets else _EMBEDDING}

    def is_shared(part: str) -> bool:
        mine, its = own[part], names[part]
        if mine not in files:
            return True
        if its not in targets:
            return False
        return _are_equal(read_tensor(files[mine], mine), read_tensor(targets[its], its))

    return TargetWeights(
        model.model.embed_tokens if is_shared(_EMBEDDING) else None, model.lm_head if is_shared(_HEAD) else None
    )


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


def _unused(weights: TargetWeights, own: dict[str, str]) -> set[str]:
    """Return the names of the drafter's tensors that are not loaded because the target's weights are used."""
    used = {_EMBEDDING: weights.embed_tokens, _HEAD: weights.lm_head}
    return {own[part] for part, weight in used.items() if weight is not None}


def _own_names(files: dict[str, Path]) -> dict[str, str]:
    """Map the target's names of the embedding and the head to those of an EAGLE checkpoint."""
    known = {_without_prefix(name): name for name in files}
    return {part: known.get(_without_prefix(part), _without_prefix(part)) for part in (_EMBEDDING, _HEAD)}


def _without_prefix(name: str) -> str:
    """Remove the prefix `model.`, which some EAGLE checkpoints have."""
    return name.removeprefix("model.")


def _eagle3_name(name: str) -> str:
    """Return the model's name of an EAGLE-3 tensor; some checkpoints call the one layer `layers.0`."""
    name = _without_prefix(name)
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
