"""Loading a checkpoint that is in the page cache: bandwidth against that of reading its files, and peak memory.

Run as `python -m benchmarks.loading`. Each measurement is a process of its own: memory that a process touches for
the first time costs more than memory that it reuses, and a loader can only use the first kind.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.report import Table

REPEATS = 5
_LAYERS, _HIDDEN, _INTERMEDIATE, _VOCABULARY, _HEADS, _HEAD_DIM = 14, 1024, 3072, 65536, 16, 64
_SHARDS = 4


def run(repeats: int = REPEATS) -> Table:
    """Medians over `repeats` processes a measurement, in turn."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model_bytes = _write_checkpoint(directory)
        shard_bytes = max(file.stat().st_size for file in directory.glob("*.safetensors"))
        seconds: dict[str, list[float]] = {}
        peaks = []
        for _ in range(repeats + 1):
            for what in _MEASUREMENTS:
                told = subprocess.check_output([sys.executable, "-m", "benchmarks.loading", what, name])
                result = json.loads(told)
                seconds.setdefault(what, []).append(result["seconds"])
                peaks.append(result["peak_bytes"] if what == "load" else 0)
    # The first round fills the page cache.
    medians = {what: statistics.median(found[1:]) for what, found in seconds.items()}
    rows = [
        (what, f"{medians[name]:.2f}", f"{model_bytes / medians[name] / 1e9:.2f}")
        for name, what in (
            ("reuse", "read the files into memory in use"),
            ("fresh", "read the files into fresh memory"),
            ("load", "load the model"),
        )
    ]
    beyond = max(peaks) - model_bytes - shard_bytes
    rows.append((f"peak beyond the model and a shard: {beyond / 1e6:.0f} MB", "", ""))
    return Table(
        "Loading",
        f"A checkpoint of {model_bytes / 1e6:.0f} MB in {_SHARDS} files, in the page cache; medians of {repeats}.",
        "at least 70 % of the read bandwidth; peak memory at most the model, one file and 300 MB.",
        ("", "s", "GB/s"),
        rows,
    )


def _write_checkpoint(directory: Path) -> int:
    """A Llama of random weights in bfloat16; its bytes."""
    import torch
    from safetensors.torch import save_file

    layer = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.k_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.v_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{index}.{name}.weight": shape for index in range(_LAYERS) for name, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"] = (_VOCABULARY, _HIDDEN)
    shapes["model.norm.weight"] = (_HIDDEN,)
    names = sorted(shapes)
    weight_map = {}
    for shard in range(_SHARDS):
        file = f"model-{shard + 1:05}-of-{_SHARDS:05}.safetensors"
        mine = names[shard::_SHARDS]
        save_file({name: torch.rand(shapes[name]).bfloat16() for name in mine}, directory / file)
        weight_map.update(dict.fromkeys(mine, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _load(directory: Path) -> float:
    import torch

    from models.kernels.cpu import runtime
    from models.loader import load_model
    from models.model_config import ModelConfig

    config = ModelConfig.from_checkpoint(directory)
    runtime.start(torch.get_num_threads())
    torch.empty(1).zero_()
    began = time.perf_counter()
    load_model(directory, config, dtype=torch.bfloat16, device=torch.device("cpu"), progress=False)
    return time.perf_counter() - began


def _read(directory: Path, *, touched: bool) -> float:
    import numpy as np

    files = sorted(directory.glob("*.safetensors"))
    memory = np.empty(sum(file.stat().st_size for file in files), dtype=np.uint8)
    if touched:
        memory.fill(1)
    began, place = time.perf_counter(), memory.data
    for file in files:
        with file.open("rb", buffering=0) as content:
            while size := content.readinto(place[: 1 << 24]):
                place = place[size:]
    return time.perf_counter() - began


_MEASUREMENTS: dict[str, Callable[[Path], float]] = {
    "reuse": lambda directory: _read(directory, touched=True),
    "fresh": lambda directory: _read(directory, touched=False),
    "load": _load,
}


def _measure(what: str, directory: Path) -> None:
    """Print the seconds of one measurement in this process, and its peak above what it had before."""
    import torch  # noqa: F401, its memory is not the loader's

    before = psutil.Process().memory_info().rss
    seconds = _MEASUREMENTS[what](directory)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "peak_bytes": int(peak.split()[1]) * 1024 - before}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _measure(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.stdout.write(run().markdown())
