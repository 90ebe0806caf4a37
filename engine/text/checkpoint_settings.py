"""A checkpoint's tokenizer_config.json and special_tokens_map.json. Read by the tokenizer and the chat template."""

import json
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.sampling_params import SamplingParams
from models.errors import CheckpointError

SPECIAL_TOKEN_NAMES = frozenset(
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "audio", "video")
)
"""Keys under which a checkpoint names a special token, and a chat template finds its text."""
_OF_TEKKEN = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Mistral's, in checkpoints whose tokenizer is tekken.json, without a tokenizer.json."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is no such file. Raises `CheckpointError` on anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must be a JSON object")
    return content


def read_special_tokens(checkpoint: Path) -> dict[str, str]:
    """Text of each special token that the checkpoint names, by its key (`eos_token`).

    tokenizer_config.json wins over special_tokens_map.json, and both win over the names of Mistral's tekken.json,
    which is read if there is no tokenizer.json. Either may write a token as a string or as an object with its text
    under `content`; null means that the model has none.
    """
    has_tekken = (checkpoint / "tekken.json").is_file() and not (checkpoint / "tokenizer.json").is_file()
    entries = {
        **(_OF_TEKKEN if has_tekken else {}),
        **read_json_object(checkpoint / "special_tokens_map.json"),
        **read_json_object(checkpoint / "tokenizer_config.json"),
    }
    tokens = {}
    for name in sorted(SPECIAL_TOKEN_NAMES & entries.keys()):
        entry = entries[name]
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            tokens[name] = text
        elif text is not None:
            raise CheckpointError(f"{name} of {checkpoint} is {entry!r}; it must be a string")
    return tokens


# Sampling parameters that a checkpoint recommends in its generation_config.json.

FILE_NAME = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Values of sampling fields that a request does not have; by default, OpenAI's.

    The file's `do_sample` is ignored: it is a setting of transformers' `generate`, and clients of this API expect a
    temperature of 1 unless the file or the request has another one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    """Most tokens generated for a request without a limit."""

    @classmethod
    def load(cls, source: str, checkpoint: Path) -> Self:
        """Read the file that `Config.generation_config` names: `auto`: the checkpoint's; `none`: no file; else the
        directory of one.

        A checkpoint without the file has OpenAI's values. Raises `CheckpointError` for an invalid value, and for a
        directory without the file.
        """
        if source == "none":
            return cls()
        path = (checkpoint if source == "auto" else Path(source).expanduser()) / FILE_NAME
        if source != "auto" and not path.is_file():
            raise CheckpointError(f"generation_config is {source}, which is not a directory with a {FILE_NAME} in it")
        values = read_json_object(path)
        fields = {name: values[name] for name in (*_FIELDS, "max_new_tokens") if values.get(name) is not None}
        try:
            _check(fields)
            return cls(**fields)
        except ValueError as error:
            raise CheckpointError(
                f"{path} cannot be used: {error}; correct it, or set generation_config to none"
            ) from None

    def sampling_params(self) -> SamplingParams:
        """Parameters of a request without any sampling fields."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        return (
            SamplingParams(**fields)
            if self.max_new_tokens is None
            else SamplingParams(**fields, max_tokens=self.max_new_tokens)
        )


def _check(fields: dict[str, Any]) -> None:
    """Raise `ValueError` unless requests may have these values."""
    for name, value in fields.items():
        whole = name in ("top_k", "max_new_tokens")
        if type(value) is not int and (whole or type(value) is not float):
            raise ValueError(f"{name} is {value!r}; it must be {'an integer' if whole else 'a number'}")
    SamplingParams(**{name: value for name, value in fields.items() if name in _FIELDS})
    longest = fields.get("max_new_tokens", 1)
    if not 1 <= longest < 2**31:
        limit = "least 1" if longest < 1 else f"most {2**31 - 1}"
        raise ValueError(f"max_new_tokens is {longest}; it must be at {limit}")
