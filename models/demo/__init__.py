"""The embedded demo model: a generator of its small world, its training script,
and the checkpoint `kaon serve` uses."""

from pathlib import Path

CHECKPOINT_DIR = Path(__file__).parent / "checkpoint"
