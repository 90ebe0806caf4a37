"""Trains the demo model from nothing: `python -m models.demo.train --out DIR` (two CPU cores, under 45 minutes).

Muon for the matrices inside the layers and AdamW for embeddings and norms, a constant rate that falls to zero over
the last steps, bf16 autocast over float32 weights. The same seed gives the same batches; an interrupted run resumes.
"""

import argparse
import copy
import ctypes
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from models.demo.dialogue import END_OF_TEXT, END_OF_TURN
from models.demo.generate import long_training_chats, training_texts
from models.demo.packing import IGNORED, Batch, Packer
from models.demo.tokenizer import CONTEXT_LENGTH, save_tokenizer, train_tokenizer

ROWS, ROW_LENGTH = 8, 384
LONG_ROWS, LONG_ROW_LENGTH = 2, 1024
LONG_EVERY = 24  # steps
STEPS = 6000  # 41 minutes at 0.41 s a step, measured on two Xeon cores with AMX
WARM_UP = 60
DECAY = 0.4  # the last share of the steps, over which the rate falls to zero
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
        # Scores and softmax written out: on a CPU its backward pass is several times the fused kernel's speed.
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text, do_sample=False
    )
    return model


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """What a server loads: bf16 weights, configs, tokenizer."""
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
        stream = f"{seed} from step {self.step}"  # a resumed run draws fresh examples rather than the first ones again
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
        # The rare long rows are not worth a second compilation.
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
    """Tells glibc to reuse large blocks instead of returning them: page faults took a third of each step."""
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
