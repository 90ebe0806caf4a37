"""Shapes of Qwen3's models, and runners of them with random weights, made on the device: no checkpoint is needed."""

import gc
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.gpu.bench import Bench
from engine.config import Config
from engine.worker.model_runner import ModelRunner
from engine.worker.step_launcher import StepLauncher
from models.attention.triton import TritonAttentionBackend
from models.base import CausalLM
from models.forward_context import set_kv_cache_data
from models.model_config import ModelConfig
from models.registry import resolve_model_class

BLOCK_SIZE = 16
_VOCABULARY = 151936


def _shape(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = True) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": _VOCABULARY,
        "tie_word_embeddings": tied,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6B": _shape(1024, 3072, 28, 16),
    "1.7B": _shape(2048, 6144, 28, 16),
    "4B": _shape(2560, 9728, 36, 32),
    "8B": _shape(4096, 12288, 36, 32, tied=False),
}
_TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}


def fields_of(bench: Bench, shape: str) -> dict[str, Any]:
    """config.json of a shape; of a tiny one in a dry run."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **(_TINY if bench.is_dry else SHAPES[shape]),
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }


class RandomRunner(ModelRunner):
    """A model runner whose weights are drawn, not read."""

    def read_weights(self, *, progress: bool) -> CausalLM:
        """See `ModelRunner`."""
        assert isinstance(self.model_config, ModelConfig)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                model = resolve_model_class(self.model_config.architecture)(self.model_config, self.parallel)
        finally:
            torch.set_default_dtype(previous)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        return cast(CausalLM, model.eval())

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads: all weights, of embeddings that are no head's too only its rows."""
        assert isinstance(self.model_config, ModelConfig)
        total = sum(parameter.nbytes for parameter in self.model.parameters())
        config = self.model_config
        return total - (0 if config.tie_word_embeddings else self.embedding_parameters * self.dtype.itemsize)

    @property
    def embedding_parameters(self) -> int:
        """Of the table of embeddings."""
        assert isinstance(self.model_config, ModelConfig)
        return self.model_config.vocab_size * self.model_config.hidden_size

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values in all layers."""
        return self.caches.block_bytes // BLOCK_SIZE


def runner_of(
    bench: Bench, shape: str, *, max_num_seqs: int, max_model_len: int, num_blocks: int, sizes: tuple[int, ...] = ()
) -> RandomRunner:
    """A runner with a cache of random numbers, and graphs of these sizes to capture; none: it runs eagerly.

    What a runner before it held is given back first, once its caller has let go of it. Raises `MemoryError`, a
    sentence, where the device has no room for it.
    """
    set_kv_cache_data({})
    # A runner and its launcher know each other: only the collector frees their weights, caches and graphs.
    gc.collect()
    config = Config.from_fields(
        num_kvcache_blocks=num_blocks,
        kv_cache_block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(16384, max_model_len),
        enable_prefix_caching=False,
        enforce_eager=not sizes,
        **({"cudagraph_capture_sizes": sizes} if sizes else {}),
    )
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(fields_of(bench, shape)))
        model_config = ModelConfig.from_checkpoint(Path(name))
        backend = TritonAttentionBackend(bench.device)
        runner = RandomRunner(config, Path(name), model_config, bench.device, bench.dtype, backend=backend)
        runner.launcher = StepLauncher(runner, bench.seam, max_num_seqs)
        runner.load()
    needed, free = num_blocks * runner.caches.block_bytes, bench.free_bytes()
    if needed > free:
        raise MemoryError(f"a KV cache of {needed / 2**30:.1f} GiB does not fit, {free / 2**30:.1f} GiB are free")
    runner.allocate_kv_cache(num_blocks)
    for pool in runner.caches.pools:
        # Layer by layer: random numbers of all at once would take as much again.
        for page in range(pool.shape[1]):
            pool[:, page].normal_()
    while runner.prepare_ahead():
        pass
    return runner
