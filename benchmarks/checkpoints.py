"""Random seeded checkpoints that every peer can load, and whose greedy answers do not end before `max_tokens`.

The embeddings are tied, so a token whose row is zero has the logit zero, which is always less than the largest of many
others: the end token, and tokens that are not a whole word, are never generated. All other tokens, and all words of a
prompt, are plain text, so any server can stream each token at once.
"""

import itertools
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.demo import CHECKPOINT_DIR

SEED = 5
END_TOKEN = "<|end|>"
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_WORDS = 1024
_STAMP = "written"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Sizes of a model of Qwen3's architecture."""

    name: str
    sizes: dict[str, int]

    def folder(self, root: Path) -> Path:
        return root / self.name


QWEN3_06B = Checkpoint(
    "qwen3-0.6b",
    {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
)
TINY = Checkpoint(
    "tiny-11m",
    {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
    },
)


def words() -> list[str]:
    """The words of which prompts consist. After a space each word is one token."""
    syllables = ["".join(pair) for pair in itertools.product(_CONSONANTS, _VOWELS)]
    return random.Random(SEED).sample(["".join(pair) for pair in itertools.product(syllables, syllables)], _WORDS)


def write(checkpoint: Checkpoint, root: Path) -> Path:
    """Return the checkpoint's folder under `root`; write the checkpoint if it is not complete."""
    folder = checkpoint.folder(root)
    if (folder / _STAMP).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    plain = _write_tokenizer(folder, checkpoint.sizes["vocab_size"])
    _write_model(folder, checkpoint, plain)
    (folder / _STAMP).touch()
    return folder


def write_random(directory: Path, config: Any, largest_file: str = "4GB") -> None:
    """Write a model of random bfloat16 weights, with a configuration of transformers and the embedded model's
    tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.save_pretrained(directory, max_shard_size=largest_file)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT_DIR / file, directory / file)


def _write_tokenizer(folder: Path, vocabulary: int) -> list[int]:
    """Train a byte-level BPE on the words, filled up to `vocabulary` tokens. Returns also the ids of tokens that are
    words.

    Raises `AssertionError` if a word is not one token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f" {word}" for word in words() * 4), trainer)
    trained = json.loads(tokenizer.to_str())
    trained["decoder"] = json.loads(decoders.ByteLevel().__getstate__())
    ids: dict[str, int] = trained["model"]["vocab"]
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    for number in range(len(ids), vocabulary):
        # No merge leads to this token, so no prompt contains it; a model may generate it.
        ids[f"{space}x{number}"] = number
    (folder / "tokenizer.json").write_text(json.dumps(trained, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "eos_token": END_TOKEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    text = "".join(f" {word}" for word in words())
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(loaded.encode(text).ids) == _WORDS, "every word has to be one token"
    return [number for token, number in ids.items() if token.startswith(space) and len(token) > 3]


def _write_model(folder: Path, checkpoint: Checkpoint, plain: list[int]) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = checkpoint.sizes
    torch.manual_seed(SEED)
    config = Qwen3Config(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    silent = torch.ones(sizes["vocab_size"], dtype=torch.bool)
    silent[plain] = False
    with torch.no_grad():
        model.get_input_embeddings().weight[silent] = 0
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=0)
    model.save_pretrained(folder)
