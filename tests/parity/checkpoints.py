"""Small, seeded, complete Hugging Face checkpoints with random weights, for any test that needs a model to load."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.run_folder import run_folder

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Family(NamedTuple):
    """A model of transformers from which checkpoints are made."""

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Fields of its config, overridden by a checkpoint's own."""
    norm_mean: float = 1.0
    """Mean of the weights of its norms: 0 if the model adds 1."""


_FAMILIES = {"llama": Family(LlamaConfig, LlamaForCausalLM), "qwen3": Family(Qwen3Config, Qwen3ForCausalLM)}
_TEXT = ["The quick brown fox jumps over the lazy dog.", "A lazy dog sleeps; the fox and the dog are friends."]


def make_checkpoint(
    directory: Path,
    family: Literal["llama", "qwen3"] | Family = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write config, weights, tokenizer and chat template into `directory`, which is returned.

    `overrides` are fields of the transformers config; `vocab_size` must be at least 259. Weights are random with
    scales for which attention is far from uniform and every bias and norm matters. A checkpoint is made once in a run,
    and then copied: tests make some of them hundreds of times.
    """
    if isinstance(family, str):
        family = _FAMILIES[family]
    fields = {
        "vocab_size": 307,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **family.defaults,
        **overrides,
    }
    # Whether it is made or copied, tests draw the same random numbers after it. transformers' configurations complete
    # sections of their arguments in place: so copies of the fields.
    with torch.random.fork_rng(devices=[]):
        write = partial(_write, family, deepcopy(fields), seed, dtype, max_shard_size)
        if not isinstance(family.config_class, type):  # A function may depend on more than its name.
            write(directory)
            return directory
        of = repr((family.config_class, family.model_class, fields, family.norm_mean, seed, dtype, max_shard_size))
        made = run_folder() / hashlib.sha256(of.encode()).hexdigest()[:32]
        if not made.exists():
            writing = Path(tempfile.mkdtemp(dir=made.parent))
            write(writing)
            with suppress(OSError):  # Another process has made it meanwhile.
                writing.rename(made)
    shutil.copytree(made, directory, copy_function=shutil.copy, dirs_exist_ok=True)
    return directory


def _write(
    family: Family, fields: dict[str, Any], seed: int, dtype: torch.dtype, max_shard_size: str, directory: Path
) -> None:
    model = family.model_class(family.config_class(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        saved = model.state_dict().keys()
        # Some routers keep a bias as a buffer. MiniMax's other buffers follow from its configuration.
        buffers = [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if name in saved and not name.endswith(("_decay", ".slope_rate"))
        ]
        for name, parameter in [*model.named_parameters(), *buffers]:
            if not parameter.is_floating_point():
                # DeepSeek-V4's table of the experts of each token.
                parameter.copy_(torch.randint(0, fields["n_routed_experts"], parameter.shape, generator=generator))
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower():
                parameter.copy_(family.norm_mean + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                fan_in = 1 if "embed" in name or parameter.dim() == 0 else parameter.shape[-1]
                parameter.copy_(noise * (1.5 * fan_in**-0.5))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = fields["eos_token_id"]
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    _write_tokenizer(directory, fields["vocab_size"])


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    values = {**json.loads(path.read_text()), **changes}
    removed = {name for name, value in changes.items() if value is None}
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in removed}))


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
