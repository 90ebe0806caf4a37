"""Each architecture computes on a GPU the same as transformers, in float32 and in bfloat16."""

from pathlib import Path

import pytest
import torch

from tests.gpu.places import ANYWHERE, ON_GPU, Place
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, Row, assert_same_distribution, prompt
from tests.parity.test_architectures import errors_by_token, log_probabilities
from tests.parity.variants import Variant, all_variants

VARIANTS = all_variants()
EACH = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.architecture}, {variant.name}")
TOLERANCE = 1e-3
"""Tolerance of log probabilities in float32: libraries add up products in other orders."""
TOLERANCE_OF_TF32 = 1e-2
"""Tolerance for recurrent layers: NVIDIA's matrix units round float32 to TF32."""


def made(variant: Variant, directory: Path) -> Path:
    return make_checkpoint(directory, variant.family, **variant.overrides)


def check_float32(path: Path, place: Place, lengths: tuple[int, int, int], tolerance: float = TOLERANCE) -> None:
    """Whole prompts, and then chunks of prompts next to decodes."""
    reference = Reference(path, device=place.device)
    model = PagedModel(path, backend=place.backend(), device=place.device)
    expected = [reference.logits(prompt(length, seed=length)) for length in lengths]
    rows = [Row(prompt(length, seed=length), slot=slot) for slot, length in enumerate(lengths)]
    first, second, third = lengths
    found = [
        model.step([(rows[0], first - 2), (rows[1], second // 2)]),
        model.step([(rows[0], 1), (rows[1], second - second // 2)], num_decodes=1),
        model.step([(rows[0], 1), (rows[2], third)], num_decodes=1),
    ]
    by_row = [
        torch.cat((found[0][0], found[1][0], found[2][0])),
        torch.cat((found[0][1], found[1][1])),
        found[2][1],
    ]
    for one, other in zip(by_row, expected, strict=True):
        assert_same_distribution(one, other, tolerance)


@EACH
@ON_GPU
def test_steps_of_all_kinds_give_the_log_probabilities_of_transformers(
    variant: Variant, place: Place, tmp_path: Path
) -> None:
    is_recurrent = variant.architecture == "Qwen3NextForCausalLM" and torch.version.hip is None
    tolerance = TOLERANCE_OF_TF32 if is_recurrent else TOLERANCE
    check_float32(made(variant, tmp_path), place, (30, 90, 9), tolerance)


@ANYWHERE
def test_a_plain_model_does_so_in_the_interpreter_too(place: Place, tmp_path: Path) -> None:
    check_float32(make_checkpoint(tmp_path, "qwen3"), place, (5, 19, 2))


@EACH
@ON_GPU
def test_bfloat16_errs_no_more_than_transformers_own(variant: Variant, place: Place, tmp_path: Path) -> None:
    path = made(variant, tmp_path)
    exact = log_probabilities(Reference(path, device=place.device))
    theirs = errors_by_token(exact, Reference(path, dtype=torch.bfloat16, device=place.device))
    model = PagedModel(path, dtype=torch.bfloat16, backend=place.backend(), device=place.device)
    ours = errors_by_token(exact, model)
    assert ours.median() < 1.25 * theirs.median()
    assert ours.quantile(0.9) < 1.5 * theirs.quantile(0.9)
