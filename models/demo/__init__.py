"""The paths of the embedded demo model: the checkpoint that `kaon serve` uses, the head that drafts for it, and the
template that it was trained with."""

from pathlib import Path

CHECKPOINT_DIR = Path(__file__).parent / "checkpoint"
DRAFT_HEAD_DIR = Path(__file__).parent / "draft_head"
"""An EAGLE head."""
CHAT_TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"
"""Read by the training script in tools/demo; the checkpoint holds a copy, which is served."""
