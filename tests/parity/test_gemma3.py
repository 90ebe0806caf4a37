"""Gemma 3's published configs, and the parts of them that cannot be served."""

from pathlib import Path

import pytest

from models.architectures.config import ModelConfig
from models.errors import CheckpointError
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, assert_computes, prompt
from tests.parity.variants.gemma3 import VARIANTS


def test_a_config_as_published_is_read_like_transformers_reads_it(tmp_path: Path) -> None:
    """Version 4 spelling: two rope bases, a scaling that applies to the global one only, a pattern."""
    path = make_checkpoint(tmp_path, VARIANTS[0].family, **VARIANTS[0].overrides)
    edit_json(
        path / "config.json",
        rope_parameters=None,
        rope_theta=50000.0,
        rope_local_base_freq=300.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        layer_types=None,
        sliding_window_pattern=2,
        tie_word_embeddings=None,
    )
    assert ModelConfig.from_checkpoint(path).sliding_windows == (24, None, 24)
    tokens = prompt(80)
    assert_computes(Reference(path), tokens, PagedModel(path).logits(tokens))


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_activation", "mish"), ("use_bidirectional_attention", True), ("attn_logit_softcapping", 50.0)],
)
def test_what_would_be_computed_wrong_is_refused(tmp_path: Path, field: str, value: object) -> None:
    path = make_checkpoint(tmp_path, VARIANTS[0].family)
    edit_json(path / "config.json", **{field: value})
    with pytest.raises(CheckpointError, match=f"{field} of .*config.json is .*; it must be"):
        PagedModel(path)
