"""Trains the demo model from scratch: `python -m tools.demo.train --out DIR` (two CPU cores, under 45 minutes).

Muon trains the matrices inside the layers, AdamW embeddings and norms; the rate is constant and falls to zero over the
last steps; bf16 autocast over float32 weights. The same seed gives the same batches; an interrupted run resumes.

The tokenizer is trained first, on generated text; texts are then packed into rows of token ids.
"""

import argparse
import copy
import ctypes
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from models.demo import CHAT_TEMPLATE_PATH
from tools.demo.examples import END_OF_TEXT, END_OF_TURN, Document
from tools.demo.generate import Text, as_text, long_training_chats, training_texts

# Packs generated texts into rows of token ids: several documents in a row, none of which attends to another.

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Batch:
    input_ids: torch.Tensor  # [rows, row_length] int64
    labels: torch.Tensor  # [rows, row_length] int64, the next token or IGNORED
    position_ids: torch.Tensor  # [rows, row_length] int64, from 0 in every document
    attention_mask: torch.Tensor  # [rows, 1, row_length, row_length] bfloat16, 0 for visible tokens, else -inf


class Packer:
    """Fills rows with whole documents, first fit; a document longer than a row is skipped."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterator[Text], rows: int, row_length: int) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._rows = rows
        self._row_length = row_length
        self._end_of_turn, self._end_of_text = (tokenizer.encode(end).ids[0] for end in (END_OF_TURN, END_OF_TEXT))
        self._answer_header = tokenizer.encode("<|im_start|>assistant\n").ids
        self._waiting: list[tuple[list[int], list[int]]] = []

    def next_batch(self) -> Batch:
        rows: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(self._rows)]
        room = [self._row_length] * self._rows
        misfits: list[tuple[list[int], list[int]]] = []
        while len(misfits) < 8:
            document = self._waiting.pop() if self._waiting else self._encode(next(self._texts))
            needed = len(document[0])
            if needed > self._row_length:
                continue
            row = next((row for row in range(self._rows) if room[row] >= needed), None)
            if row is None:
                misfits.append(document)
            else:
                rows[row].append(document)
                room[row] -= needed
        self._waiting = misfits
        return self._collate(rows)

    def _encode(self, text: Text) -> tuple[list[int], list[int]]:
        """Token ids and labels; the label at a position is the next token, if that token is to be learned."""
        if isinstance(text, Document):
            ids: list[int] = []
            learned: list[bool] = []
            for piece, is_learned in text.pieces:
                piece_ids = self._tokenizer.encode(piece).ids
                ids += piece_ids
                learned += [is_learned] * len(piece_ids)
            ids.append(self._end_of_text)
            learned.append(True)
        else:
            ids = self._tokenizer.encode(as_text(text)).ids
            learned = self._answers(ids)
        labels = [token if is_learned else IGNORED for token, is_learned in zip(ids, learned, strict=True)]
        return ids, [*labels[1:], IGNORED]

    def _answers(self, ids: list[int]) -> list[bool]:
        """True from the first token of each assistant turn to its end-of-turn token."""
        learned = [False] * len(ids)
        header = self._answer_header
        inside = False
        for at, token in enumerate(ids):
            learned[at] = inside
            starts = ids[max(0, at + 1 - len(header)) : at + 1] == header
            inside = starts or (inside and token != self._end_of_turn)
        return learned

    def _collate(self, rows: list[list[tuple[list[int], list[int]]]]) -> Batch:
        shape = (self._rows, self._row_length)
        input_ids = torch.full(shape, self._end_of_text)
        labels = torch.full(shape, IGNORED)
        position_ids = torch.zeros(shape, dtype=torch.int64)
        document_ids = torch.full(shape, -1)
        for row, documents in enumerate(rows):
            start = 0
            for number, (ids, wanted) in enumerate(documents):
                span = slice(start, start + len(ids))
                input_ids[row, span] = torch.tensor(ids)
                labels[row, span] = torch.tensor(wanted)
                position_ids[row, span] = torch.arange(len(ids))
                document_ids[row, span] = number
                start += len(ids)
        same_document = document_ids[:, :, None] == document_ids[:, None, :]
        visible = (same_document & torch.ones(self._row_length, self._row_length).tril().bool())[:, None]
        # A large finite number: -inf would turn a fully hidden row into NaN.
        mask = torch.zeros_like(visible, dtype=torch.bfloat16).masked_fill_(~visible, -1e9)
        return Batch(input_ids, labels, position_ids, mask)


# Trains the tokenizer on generated text: byte-level BPE in which every digit is a token of its own.

VOCABULARY_SIZE = 1536
CONTEXT_LENGTH = 4096
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
# Not special, so that decoding keeps them: the server parses them out of the text.
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")


def train_tokenizer(texts: int = 40_000, seed: int = 1) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(MARKUP_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = itertools.islice(training_texts(seed), texts)
    tokenizer.train_from_iterator((as_text(text) for text in sample), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json, and the files that transformers' AutoTokenizer needs."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    template = CHAT_TEMPLATE_PATH.read_text()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


ROWS, ROW_LENGTH = 8, 384
LONG_ROWS, LONG_ROW_LENGTH = 2, 1024
LONG_EVERY = 24  # steps
STEPS = 6000  # 41 minutes at 0.41 s a step, measured on two Xeon cores with AMX
WARM_UP = 60
DECAY = 0.4  # the last fraction of the steps, over which the rate falls to zero
PEAK_LEARNING_RATE = 2e-3
SAVE_EVERY = 100


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    end_of_turn, end_of_text = tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        # Scores and softmax in single operations: on a CPU, their backward pass is several times faster than the fused
        # kernel's.
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text, do_sample=False
    )
    return model


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the files that a server loads: bf16 weights, configs, tokenizer."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, out)


class Trainer:
    """The training loop, and the state it saves for a run that is interrupted."""

    def __init__(self, out: Path, steps: int, seed: int, compiled: bool) -> None:
        torch.manual_seed(seed)
        self.out = out
        self.steps = steps
        self.step = 0
        self._state_path = out / "training_state.pt"
        resumed = self._state_path.exists()
        self.tokenizer = Tokenizer.from_file(str(out / "tokenizer.json")) if resumed else train_tokenizer()
        self.model = build_model(self.tokenizer)
        self._compiled = torch.compile(self.model.model, dynamic=False) if compiled else self.model.model
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        )
        if resumed:
            self._resume()
        stream = f"{seed} from step {self.step}"  # a resumed run uses new examples
        self._packers = (
            Packer(self.tokenizer, training_texts(stream), ROWS, ROW_LENGTH),
            Packer(self.tokenizer, long_training_chats(stream), LONG_ROWS, LONG_ROW_LENGTH),
        )

    def run(self) -> None:
        started, seen, smooth = time.monotonic(), 0, math.nan
        while self.step < self.steps:
            batch = self._next_batch()
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = PEAK_LEARNING_RATE * self._schedule()
            loss = self._train(batch)
            self.step += 1
            seen += batch.input_ids.numel()
            smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
            if self.step % 20 == 0:
                elapsed = time.monotonic() - started
                print(
                    f"step {self.step} loss {smooth:.4f} tokens {seen} {seen / elapsed:.0f}/s {elapsed:.0f} s",
                    flush=True,
                )
            if self.step % SAVE_EVERY == 0:
                self._save()
        save_checkpoint(self.model, self.tokenizer, self.out)
        self._state_path.unlink(missing_ok=True)

    def _next_batch(self) -> Batch:
        return self._packers[self.step % LONG_EVERY == LONG_EVERY - 1].next_batch()

    def _schedule(self) -> float:
        return min(1.0, (self.step + 1) / WARM_UP, (self.steps - self.step) / (self.steps * DECAY))

    def _train(self, batch: Batch) -> float:
        learned = batch.labels != IGNORED
        # The rare long rows do not justify a second compilation.
        forward = self._compiled if batch.input_ids.shape[1] == ROW_LENGTH else self.model.model
        with torch.autocast("cpu", torch.bfloat16):
            hidden = forward(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=batch.position_ids,
                use_cache=False,
            ).last_hidden_state
            logits = self.model.lm_head(hidden[learned])
        loss = F.cross_entropy(logits.float(), batch.labels[learned])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def _save(self) -> None:
        save_checkpoint(self.model, self.tokenizer, self.out)
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        partial = self._state_path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._state_path)

    def _resume(self) -> None:
        state = torch.load(self._state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]


def keep_freed_memory() -> None:
    """Make glibc reuse large blocks instead of returning them: page faults took a third of each step."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--no-compile", action="store_true", help="train without torch.compile (no C++ compiler needed)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    Trainer(arguments.out, arguments.steps, arguments.seed, not arguments.no_compile).run()


if __name__ == "__main__":
    main()
