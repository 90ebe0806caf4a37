"""`load_head`: reads the layers that a model applies to the pooled vector of a prompt."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import tokenizers
import torch
from safetensors import SafetensorError, safe_open

from models.architectures.pooling import HeadLayer, PoolingConfig
from models.config.weight_files import weight_files
from models.errors import CheckpointError
from models.layers.pooling import PoolingHead, VectorLayer

_LANGUAGE_HEADS = (
    *("lm_head.weight", "embed_out.weight", "model.embed_tokens.weight", "embed_tokens.weight"),
    *("word_embeddings.weight", "wte.weight", "embeddings.weight"),
)
"""Names of the tensor with the logit weights of tokens, in order of precedence: the head, or the tied embedding."""


def load_head(path: Path, pooling: PoolingConfig, device: torch.device) -> PoolingHead:
    """Load the pooling head of the checkpoint directory `path`.

    Raises `CheckpointError` if a tensor is missing or has a wrong shape.
    """
    if pooling.label_tokens is not None:
        layers = [_answer_layer(path, pooling.label_tokens)]
    else:
        layers = [_layer(path, layer) for layer in pooling.head]
    for layer, after in itertools.pairwise(layers):
        if after.weight.shape[-1] != layer.weight.shape[0]:
            raise CheckpointError(
                f"a layer of the head of {path} takes {after.weight.shape[-1]} features, but gets "
                f"{layer.weight.shape[0]}; download the checkpoint again"
            )
    if layers and layers[-1].weight.shape[0] != pooling.dimension:
        raise CheckpointError(
            f"the head of {path} gives {layers[-1].weight.shape[0]} features, but its configuration says "
            f"{pooling.dimension}; download the checkpoint again"
        )
    return PoolingHead(
        tuple(
            layer._replace(weight=layer.weight.to(device), bias=None if layer.bias is None else layer.bias.to(device))
            for layer in layers
        )
    )


def _layer(path: Path, layer: HeadLayer) -> VectorLayer:
    files = weight_files(path / layer.folder if layer.folder else path)
    weight = _find(files, f"{layer.name}.weight")
    if weight is None:
        raise CheckpointError(f"{path / layer.folder} lacks {layer.name}.weight, which its head needs")
    return VectorLayer(weight, _find(files, f"{layer.name}.bias"), layer.activation, layer.norm_eps)


def _answer_layer(path: Path, no_and_yes: tuple[str | int | None, str | int]) -> VectorLayer:
    """Return the layer that computes a reranker's raw score: the logit of "yes" minus the logit of "no", if given."""
    files = weight_files(path)
    no, yes = (None if token is None else _token_row(path, files, _token_id(path, token)) for token in no_and_yes)
    assert yes is not None
    weight, bias = yes if no is None else tuple(each - other for each, other in zip(yes, no, strict=True))
    return VectorLayer(weight[None], bias[None])


def _token_id(path: Path, token: str | int) -> int:
    if isinstance(token, int):
        return token
    file = path / "tokenizer.json"
    try:
        found: int | None = tokenizers.Tokenizer.from_file(str(file)).token_to_id(token)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file} cannot be read: {error}; download the checkpoint again") from error
    if found is None:
        raise CheckpointError(f"{file} has no token {token!r}, whose logit the score is made of")
    return found


def _token_row(path: Path, files: Iterable[Path], token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the bias of the language-model head that compute a token's logit. # [hidden_size], []"""
    for name in _LANGUAGE_HEADS:
        row = _find(files, name, token_id)
        if row is not None:
            bias = _find(files, "lm_head.bias", token_id)
            return row, row.new_zeros(()) if bias is None else bias
    raise CheckpointError(f"{path} lacks {_LANGUAGE_HEADS[0]}, which its score needs")


def _find(files: Iterable[Path], name: str, row: int | None = None) -> torch.Tensor | None:
    """Return the tensor of that name, or one row of it, as float32, or None if no file has it.

    The name may have a prefix in the checkpoint, as in `bert.pooler.dense.weight`.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118, not a dict
                    if key == name or key.partition(".")[2] == name:
                        part: torch.Tensor = tensors.get_tensor(key) if row is None else tensors.get_slice(key)[row]
                        if not part.is_floating_point() or part.dtype.itemsize < 2:
                            raise CheckpointError(f"{key} in {file} is {part.dtype}; it must not be quantised")
                        return part.to(torch.float32)
        except (SafetensorError, OSError, IndexError) as error:
            raise CheckpointError(f"{name} of {file} cannot be read ({error}); download it again") from error
    return None
