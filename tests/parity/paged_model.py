"""`PagedModel`: a loaded model with a paged cache, run step by step without the engine."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from engine.runner.kv_cache import LayerCaches
from models.attention.backend import AttentionBackend, AttentionBatch, select_backend
from models.attention.context import Context, DPMetadata, forward_context, set_kv_cache_data
from models.config.rope import with_lengths
from models.loading.checkpoint import ModelImpl, read_checkpoint_config
from models.loading.loader import load_model
from models.lora.adapters import group_by_adapter
from models.ops.types import KVCacheTensor, LayerCache, StateCache, VectorCache
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel
from models.quantization.config import Rounding
from tests.parity.thread_ranks import ThreadExchange
from tests.parity.tolerance import assert_within, with_bound

CPU = torch.device("cpu")
NUM_SLOTS = 8


@dataclass
class Row:
    """A sequence: its tokens, its blocks, and how many of its tokens are computed."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int = 0
    adapter: int = 0
    num_prompt_tokens: int = 0
    """Number of its tokens when its first ones were computed."""


class PagedModel:
    """Blocks are assigned in shuffled order, from a cache full of NaN: memory that was not written must not be
    read."""

    def __init__(
        self,
        path: Path,
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        max_model_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        model_impl: ModelImpl = "auto",
        kv_dtype: torch.dtype | None = None,
        rounding: Rounding | None = None,
        backend: AttentionBackend | None = None,
        parallel: TensorParallel = SINGLE_RANK,
        device: torch.device = CPU,
    ) -> None:
        config = read_checkpoint_config(path, model_impl)
        self.config = replace(config, max_model_len=max_model_len or config.max_model_len)
        self.rope = self.config.rope_context(self.config.max_model_len)
        self.model = load_model(
            path, self.config, dtype=dtype, device=device, progress=False, parallel=parallel, rounding=rounding
        )
        self.backend = select_backend(device) if backend is None else backend
        self.device = device
        self.exchange = parallel.experts.exchange if parallel.experts else None
        self.block_size = block_size
        self.free = np.random.default_rng(0).permutation(num_blocks).tolist()
        caches = LayerCaches(
            self.model.kv_cache_layers(),
            self.backend,
            block_size=block_size,
            num_slots=NUM_SLOTS,
            dtype=dtype,
            device=device,
            kv_dtype=kv_dtype,
        )
        self.cache = caches.allocate(num_blocks)
        for layer in self.cache.values():
            for tensor in tensors_of(layer):
                tensor.fill_(torch.nan)

    def step(self, spans: list[tuple[Row, int]], *, num_decodes: int = 0) -> list[torch.Tensor]:
        """Compute the next `n` tokens of each row. Returns the logits of all of them, by row. # [n, V]"""
        input_ids, positions, slots = [], [], []
        for row, count in spans:
            end = row.computed + count
            while len(row.blocks) * self.block_size < end:
                row.blocks.append(self.free.pop())
            span = np.arange(row.computed, end)
            input_ids += row.tokens[row.computed : end]
            if not row.computed:
                row.num_prompt_tokens = len(row.tokens)
            length = self.rope.length_of(row.num_prompt_tokens, len(row.tokens)) if self.rope else 0
            positions.append(with_lengths(span, np.full_like(span, length)))
            slots.append(np.array(row.blocks)[span // self.block_size] * self.block_size + span % self.block_size)
            row.computed = end
        tables = np.full((len(spans), max(len(row.blocks) for row, _ in spans) + 1), -1, dtype=np.int32)
        for index, (row, _) in enumerate(spans):
            tables[index, : len(row.blocks)] = row.blocks
        counts = [count for _, count in spans]
        metadata = self.backend.build_metadata(
            AttentionBatch(
                query_lens=np.array(counts),
                seq_lens=np.array([row.computed for row, _ in spans]),
                block_tables=tables,
                slot_mapping=np.concatenate(slots).astype(np.int64),
                num_decodes=num_decodes,
                states=np.array([row.slot for row, _ in spans], dtype=np.int64),
            )
        )
        at = torch.from_numpy(np.concatenate(positions)).to(self.device)
        set_kv_cache_data(self.cache)
        context = Context(positions=at, is_prefill=num_decodes < len(spans), batch_size=len(spans))
        dp_metadata = DPMetadata(self.exchange.agree(len(at))) if isinstance(self.exchange, ThreadExchange) else None
        lora = group_by_adapter(np.array([row.adapter for row, _ in spans]), np.array(counts), self.device)
        with torch.inference_mode(), forward_context(metadata, context, dp_metadata, lora=lora):
            hidden = self.model(torch.tensor(input_ids, device=self.device), at)
        set_kv_cache_data({})
        with torch.inference_mode():
            return list(self.model.compute_logits(hidden).cpu().split(counts))

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits of a whole prompt in one step. # [len(tokens), V]"""
        return self.logits_together([tokens])

    def logits_together(self, prompts: list[list[int]]) -> torch.Tensor:
        """Logits of up to `NUM_SLOTS` whole prompts in one step. # [their tokens, V]"""
        rows = [Row(tokens, slot=slot) for slot, tokens in enumerate(prompts)]
        logits = self.step([(row, len(row.tokens)) for row in rows])
        for row in rows:
            self.release(row)
        return torch.cat(logits)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The greedy continuation of `count` tokens: one prefill, then decodes."""
        row = Row(list(prompt))
        row.tokens.append(int(self.step([(row, len(prompt))])[0][-1].argmax()))
        for _ in range(count - 1):
            row.tokens.append(int(self.step([(row, 1)], num_decodes=1)[0][-1].argmax()))
        self.release(row)
        return row.tokens[len(prompt) :]

    def argmax_tokens(self, prompts: list[list[int]], continuations: list[list[int]]) -> list[list[int]]:
        """The argmax at each position of continuations of equal length, computed in one batch.

        Meaningless on a rank that does not have the whole vocabulary's logits.
        """
        texts = zip(prompts, continuations, strict=True)
        rows = [Row([*tokens, *more], slot=slot) for slot, (tokens, more) in enumerate(texts)]
        chosen: list[list[int]] = [[] for _ in rows]
        for number in range(len(continuations[0])):
            spans = [(row, 1 if number else len(tokens)) for row, tokens in zip(rows, prompts, strict=True)]
            for logits, tokens in zip(self.step(spans, num_decodes=len(rows) if number else 0), chosen, strict=True):
                tokens.append(int(logits[-1].argmax()))
        return chosen

    def release(self, row: Row) -> None:
        """Free a row's blocks and fill them with poison."""
        for layer in self.cache.values():
            place = row.slot if isinstance(layer, StateCache) else row.blocks
            for tensor in tensors_of(layer):
                tensor[place] = torch.nan
        self.free += row.blocks


def tensors_of(cache: LayerCache) -> tuple[torch.Tensor, ...]:
    """All tensors of a layer's cache."""
    match cache:
        case KVCacheTensor():
            return cache.k_cache, cache.v_cache
        case VectorCache():
            return (cache.vectors,)
        case StateCache():
            return cache.tensors


class Reference:
    """transformers' own model of a checkpoint."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> None:
        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """# [len(tokens), V]"""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens], device=self.device)).logits[0].cpu()

    def logits_together(self, prompts: list[list[int]]) -> torch.Tensor:
        """Of prompts of one length. # [their tokens, V]"""
        with torch.inference_mode():
            return self.model(torch.tensor(prompts, device=self.device)).logits.flatten(0, 1).cpu()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The greedy continuation, including EOS. Each token is of a whole pass.

        With their caches, models such as Nemotron-H choose other tokens than in a whole pass.
        """
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def argmax_tokens(self, prompts: list[list[int]], continuations: list[list[int]]) -> list[list[int]]:
        """The argmax at each position of continuations, each in one pass: they are greedy if these equal them."""
        texts = zip(prompts, continuations, strict=True)
        return [self.logits(tokens + more)[len(tokens) - 1 : -1].argmax(-1).tolist() for tokens, more in texts]


def prompt(length: int, *, seed: int = 0, vocab_size: int = 307) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def distribution(model: PagedModel | Reference, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities of a float32 model, and bounds of their rounding errors. # [n, V], [n, 1]"""
    return with_bound(model.model, lambda: model.logits(tokens).log_softmax(-1))


def assert_computes(model: PagedModel | Reference, tokens: list[int], found: torch.Tensor) -> None:
    """Assert that logits `found` are those of `model` for the last of `tokens`, up to rounding. # found: [n, V]"""
    expected, bound = (each[-len(found) :] for each in distribution(model, tokens))
    assert_within(found.log_softmax(-1), expected, bound)


def assert_same_distribution(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Assert that log probabilities of every token at every position agree."""
    assert_within(found.log_softmax(-1), expected.log_softmax(-1), torch.tensor(tolerance))
