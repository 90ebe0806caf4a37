"""A checkpoint's tokenizer_config.json and special_tokens_map.json. Read by the tokenizer and the chat template."""

import json
from pathlib import Path
from typing import Any

from models.errors import CheckpointError

SPECIAL_TOKEN_NAMES = frozenset(
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "audio", "video")
)
"""Keys under which a checkpoint names a special token, and a chat template finds its text."""


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

    tokenizer_config.json wins over special_tokens_map.json. Either may write a token as a string or as an object
    with its text under `content`; null means that the model has none.
    """
    entries = {
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
