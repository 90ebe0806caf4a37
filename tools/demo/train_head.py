"""Trains the demo model's draft head: `python -m tools.demo.train_head --out DIR` writes it as an EAGLE checkpoint.

EAGLE (Li et al., 2024): one decoder layer reads the target's final hidden state at a position and the embedding of the
next token, and predicts the next hidden state, from which the target's own head computes the logits of the token
after. It learns the target's distributions on the corpus, in as many passes as it drafts tokens when it is served;
each pass reads the hidden states of the previous one (the "training-time test" of EAGLE-3, 2025). The same seed gives
the same batches.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from models.demo import CHECKPOINT_DIR, DRAFT_HEAD_DIR
from tools.demo.evaluate import MAX_NEW_TOKENS
from tools.demo.examples import render_prompt
from tools.demo.generate import held_out_texts, long_training_chats, training_texts
from tools.demo.train import (
    IGNORED,
    LONG_EVERY,
    LONG_ROW_LENGTH,
    LONG_ROWS,
    ROW_LENGTH,
    ROWS,
    Batch,
    Packer,
    keep_freed_memory,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 256, 4, 2, 64, 192
THETA = 10_000.0
EPS = 1e-6
PASSES = 4
"""Number of trained passes, which is the most tokens that may be drafted."""
STEPS, WARM_UP, DECAY = 720, 30, 0.3
PEAK_LEARNING_RATE = 3e-3
SAVE_EVERY = 100


class Norm(nn.Module):
    """Root-mean-square normalisation with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (HIDDEN,), self.weight, EPS)


class Layer(nn.Module):
    """A Llama decoder layer without a norm before its attention; the names are the checkpoint's."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False),
                "k_proj": nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False),
                "v_proj": nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False),
                "o_proj": nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(HIDDEN, INTERMEDIATE, bias=False),
                "up_proj": nn.Linear(HIDDEN, INTERMEDIATE, bias=False),
                "down_proj": nn.Linear(INTERMEDIATE, HIDDEN, bias=False),
            }
        )
        self.post_attention_layernorm = Norm()


class Head(nn.Module):
    """The head, over whole rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList([Layer()])
        # Embeddings are a tenth as large as final hidden states.
        nn.init.normal_(self.fc.weight[:, :HIDDEN], std=0.4)
        nn.init.normal_(self.fc.weight[:, HIDDEN:], std=0.03)
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)

    def passes(self, embedded: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> Iterator[torch.Tensor]:
        """Compute the hidden states of pass after pass, at the position of the last token that each has read.

        A pass at position j has read tokens up to j + 1. For the last of these, as many as the number of the pass, it
        has no hidden states of the target. # embedded [rows, length, HIDDEN] of the next tokens, hidden the same ->
        the same
        """
        layer = cast(Layer, self.layers[0])
        rotation = _rotation(batch.position_ids)
        keys: list[torch.Tensor] = []  # each [rows, HEADS, length, HEAD_DIM]
        values: list[torch.Tensor] = []
        for number in range(PASSES):
            x: torch.Tensor = self.fc(torch.cat([embedded, hidden], dim=-1))
            attention, mlp = layer.self_attn, layer.mlp
            q = _rotated(_split(attention["q_proj"](x)), rotation)
            keys.append(_rotated(_split(attention["k_proj"](x)), rotation).repeat_interleave(HEADS // KV_HEADS, 1))
            values.append(_split(attention["v_proj"](x)).repeat_interleave(HEADS // KV_HEADS, 1))
            attended = _attend(q, keys, values, batch.attention_mask, number)
            x = x + attention["o_proj"](attended.transpose(1, 2).flatten(2))
            normed = layer.post_attention_layernorm(x)
            x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
            yield x
            hidden = _shifted(x, 1)


def _split(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2)


def _rotation(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None, :, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift by `by` positions; the first become zero. # [rows, length, ...]"""
    return x if by == 0 else torch.cat([torch.zeros_like(x[:, :by]), x[:, :-by]], dim=1)


def _attend(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], mask: torch.Tensor, number: int
) -> torch.Tensor:
    """Attention of pass `number`: to the first pass's keys up to `number` positions before, and to one of each later
    pass.

    # q [rows, HEADS, length, HEAD_DIM] -> the same
    """
    length, scale = q.shape[2], HEAD_DIM**-0.5
    first = q @ keys[0].transpose(2, 3) * scale + mask
    first = first.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1 - number), -1e9)
    later = [_shifted_heads(each, number - at) for at, each in enumerate(keys) if at]
    scores = [first, *((q * each).sum(-1, keepdim=True) * scale for each in later)]
    weights = torch.cat(scores, dim=-1).float().softmax(-1).to(q.dtype)
    out = weights[..., :length] @ values[0]
    for at, each in enumerate(values):
        if at:
            out = out + weights[..., length + at - 1 :][..., :1] * _shifted_heads(each, number - at)
    return out


def _shifted_heads(x: torch.Tensor, by: int) -> torch.Tensor:
    return _shifted(x.transpose(1, 2), by).transpose(1, 2)


class Target:
    """The demo model, whose weights do not change."""

    def __init__(self, checkpoint: Path = CHECKPOINT_DIR) -> None:
        self.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        ).eval()
        self.model.requires_grad_(False)

    @torch.no_grad()
    def hidden(self, batch: Batch) -> torch.Tensor:
        """Final hidden states. # [rows, length, HIDDEN]"""
        output = self.model.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
        )
        return output.last_hidden_state  # type: ignore[no-any-return]

    def embedded_next(self, batch: Batch) -> torch.Tensor:
        """Embeddings of the token after each position. # [rows, length, HIDDEN]"""
        return self.model.model.embed_tokens(batch.input_ids.roll(-1, 1))  # type: ignore[no-any-return]


def drafted(batch: Batch, number: int) -> torch.Tensor:
    """Positions at which pass `number` drafts: its token, and those since the target's last, belong to an answer.

    # [rows, length] bool
    """
    learned = batch.labels != IGNORED
    found = learned.roll(-1, 1)
    found[:, -1] = False
    for back in range(number + 1):
        found = found & _shifted(learned, back)
    return found


class Trainer:
    """The training loop."""

    def __init__(self, target: Target, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.target, self.steps = target, steps
        self.head = Head()
        matrices = [p for p in self.head.parameters() if p.ndim == 2]
        others = [p for p in self.head.parameters() if p.ndim != 2]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        )
        stream = f"head {seed}"
        self._packers = (
            Packer(target.tokenizer, training_texts(stream), ROWS, ROW_LENGTH),
            Packer(target.tokenizer, long_training_chats(stream), LONG_ROWS, LONG_ROW_LENGTH),
        )

    def run(self, out: Path) -> None:
        started = time.monotonic()
        smooth: list[float] = []
        for step in range(self.steps):
            rate = min(1.0, (step + 1) / WARM_UP, (self.steps - step) / (self.steps * DECAY))
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = PEAK_LEARNING_RATE * rate
            shares = self._train(self._packers[step % LONG_EVERY == LONG_EVERY - 1].next_batch())
            smooth = [0.95 * old + 0.05 * new for old, new in zip(smooth or shares, shares, strict=True)]
            if step % 20 == 19:
                figures = " ".join(f"{share:.3f}" for share in smooth)
                print(f"step {step + 1} agrees {figures} {time.monotonic() - started:.0f} s", flush=True)
            if step % SAVE_EVERY == SAVE_EVERY - 1:
                save(self.head, out)
        save(self.head, out)

    def _train(self, batch: Batch) -> list[float]:
        """The ratio of each pass's drafts that are the target's most probable tokens."""
        losses, shares = [], []
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.target.hidden(batch)
            with torch.no_grad():
                wanted = self.target.model.lm_head(hidden).float().log_softmax(-1).roll(-1, 1)
            for number, guessed in enumerate(self.head.passes(self.target.embedded_next(batch), hidden, batch)):
                where = drafted(batch, number)
                found = self.target.model.lm_head(guessed[where]).float().log_softmax(-1)
                expected = wanted[where]
                losses.append(F.kl_div(found, expected, log_target=True, reduction="batchmean"))
                shares.append((found.argmax(-1) == expected.argmax(-1)).float().mean().item())
        torch.autograd.backward(torch.stack(losses).mean())
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return shares


def save(head: Head, out: Path) -> None:
    """Write EAGLE's published layout; embedding and language-model head are the target's."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    target = json.loads((CHECKPOINT_DIR / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "attention_bias": False,
        "bias": False,
        "dtype": "bfloat16",
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": target["max_position_embeddings"],
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": target["vocab_size"],
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def evaluate(target: Target, head: Head, sample: int, seed: int) -> None:
    """Print how many drafts the target accepts while it answers held-out questions greedily, by category."""
    all_counts = torch.zeros(PASSES, 2, dtype=torch.int64)
    print("| category | " + " | ".join(f"draft {number + 1}" for number in range(PASSES)) + " | tokens a step |")
    print("|---|" + "---:|" * (PASSES + 1))
    for category, texts in held_out_texts(seed, sample).items():
        counts = torch.zeros(PASSES, 2, dtype=torch.int64)
        for prompt, answer in answers(target, [render_prompt(text) for text in texts]):
            counts += _acceptance(target, head, [*prompt, *answer], len(prompt))
        all_counts += counts
        _print_row(category, counts)
    _print_row("all", all_counts)


def answers(target: Target, prompts: list[str]) -> Iterator[tuple[list[int], list[int]]]:
    """The token ids of each prompt, and those of the answer up to its end token."""
    encoded = [target.tokenizer.encode(prompt).ids for prompt in prompts]
    width, pad = max(map(len, encoded)), int(target.model.generation_config.pad_token_id)
    rows = torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded])
    found = target.model.generate(rows, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS)
    ends = set(target.model.generation_config.eos_token_id)
    for ids, row in zip(encoded, found[:, width:].tolist(), strict=True):
        last = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
        yield ids, row[: last + 1]


def _print_row(name: str, counts: torch.Tensor) -> None:
    chances = [int(accepted) / max(1, int(of)) for accepted, of in counts]
    expected = 1 + sum(math.prod(chances[: number + 1]) for number in range(PASSES))
    print(f"| {name} | " + " | ".join(f"{chance:.1%}" for chance in chances) + f" | {expected:.2f} |", flush=True)


def _acceptance(target: Target, head: Head, row: list[int], num_prompt: int) -> torch.Tensor:
    """For each draft: how often the target accepts it, and how often it accepted all drafts before it. # [PASSES,
    2]"""
    length = len(row)
    labels = torch.full((1, length), IGNORED)
    labels[0, num_prompt - 1 : -1] = torch.tensor(row[num_prompt:])
    mask = torch.zeros(1, 1, length, length).masked_fill_(torch.ones(length, length).triu(1).bool(), -1e9)
    batch = Batch(torch.tensor([row]), labels, torch.arange(length)[None], mask)
    was_taken = torch.ones(length, dtype=torch.bool)
    counts = torch.zeros(PASSES, 2, dtype=torch.int64)
    following = batch.input_ids[0].roll(-2)
    for number, guessed in enumerate(head.passes(target.embedded_next(batch), target.hidden(batch), batch)):
        here = drafted(batch, number)[0] & was_taken
        is_taken = here & (target.model.lm_head(guessed[0]).argmax(-1) == following)
        counts[number] = torch.tensor([int(is_taken.sum()), int(here.sum())])
        was_taken = is_taken.roll(1)
    return counts


def load(path: Path) -> Head:
    """Load a saved head."""
    from safetensors.torch import load_file

    head = Head()
    head.load_state_dict({name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()})
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DRAFT_HEAD_DIR)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true", help="do not train: print what the head in --out reaches")
    parser.add_argument("--sample", type=int, default=20, help="held-out examples a category")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    target = Target()
    if not arguments.evaluate:
        Trainer(target, arguments.steps, arguments.seed).run(arguments.out)
    evaluate(target, load(arguments.out), arguments.sample, arguments.seed)


if __name__ == "__main__":
    main()
