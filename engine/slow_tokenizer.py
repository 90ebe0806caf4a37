"""`convert_slow_tokenizer`: for the checkpoint that has no tokenizer.json. Called by `Tokenizer.from_checkpoint`."""

from pathlib import Path

import tokenizers

from models.errors import CheckpointError


def convert_slow_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a checkpoint that brings only a SentencePiece or a tiktoken file, converted by transformers.

    The one place on the front end that imports transformers and, with it, torch: seconds and hundreds of megabytes.
    Raises `CheckpointError` where that cannot be done.
    """
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # each converter raises errors of its own
        raise CheckpointError(
            f"{path} holds no tokenizer.json, and transformers cannot convert another tokenizer from it; add the "
            "file, or install sentencepiece or tiktoken if the checkpoint brings such a tokenizer"
        ) from error
    backend: tokenizers.Tokenizer | None = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"{path} holds no tokenizer.json, and its tokenizer has no fast form; add the file")
    return backend
