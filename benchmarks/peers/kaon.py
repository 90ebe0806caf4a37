"""Kaon: this tree's, or another one's whose command line is given."""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.checkpoints import Checkpoint
from benchmarks.peers.contestant import Command, Contestant


class Kaon(Contestant):
    """`kaon serve` as it comes, or with int8 weights."""

    def __init__(self, precision: str, program: Sequence[str] = ()) -> None:
        self.name = "kaon" if precision == "bf16" else f"kaon-{precision}"
        self.title = f"Kaon, {precision}"
        self.precision = precision
        self._program = tuple(program) or (sys.executable, "-m", "server")

    def install(self) -> None:
        """Nothing: it runs from where this runs."""

    def version(self) -> str:
        return f"kaon {version('kaon')}, torch {version('torch')}"

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        flags = () if self.precision == "bf16" else ("--quantization", self.precision)
        return Command(
            (
                *(*self._program, "serve", str(model), "--port", str(port)),
                *("--served-model-name", checkpoint.name, "--log-level", "warning", *flags),
            )
        )
