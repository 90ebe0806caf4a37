"""`transformers serve` with continuous batching."""

from pathlib import Path

from benchmarks.peers.checkpoints import Checkpoint
from benchmarks.peers.contestant import Command, Contestant
from benchmarks.peers.environments import PEERS, install, versions

_FOLDER = PEERS / "transformers"


class TransformersServe(Contestant):
    """bf16, on the CPU. The share of memory for the KV cache is held down: by itself it takes nearly all."""

    name = "transformers"
    title = "transformers serve, bf16"
    precision = "bf16"

    def install(self) -> None:
        install("transformers", ["transformers[serving]==5.23.0", "accelerate", "psutil"])

    def version(self) -> str:
        return versions("transformers", "transformers", "torch")

    def served_name(self, checkpoint: Checkpoint, model: Path) -> str:
        return str(model)

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        return Command(
            (
                *(str(_FOLDER / "bin" / "transformers"), "serve", str(model), "--port", str(port)),
                *("--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"),
                *("--cb-max-memory-percent", "0.2", "--log-level", "error"),
            ),
            {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
        )
