"""The embedded demo model: a generator of its small world, its training script,
and the checkpoint `kaon serve` uses."""

from pathlib import Path

CHECKPOINT_DIR = Path(__file__).parent / "checkpoint"
CHAT_TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"
"""Read by the training script and by tests; the checkpoint holds a copy, which is served."""
