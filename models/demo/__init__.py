"""The paths of the embedded demo model: the checkpoint that `kaon serve` uses and the template it was trained with."""

from pathlib import Path

CHECKPOINT_DIR = Path(__file__).parent / "checkpoint"
CHAT_TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"
"""Read by the training script in tools/demo; the checkpoint holds a copy, which is served."""
