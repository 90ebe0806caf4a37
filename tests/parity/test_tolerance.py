"""Bounds of rounding errors admit every order of summation and exclude a wrong weight."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import Reference, distribution, prompt
from tests.parity.tolerance import assert_as_exact, assert_within, in_float64, with_bound
from tests.parity.variants import Variant, gemma3, llama


@pytest.mark.parametrize("size", [3, 64, 1000])
def test_sums_in_any_order_are_within_the_bound(size: int) -> None:
    linear, x = nn.Linear(size, 16, bias=False), torch.randn(20, size)
    with torch.inference_mode():
        _, bound = with_bound(linear, lambda: linear(x))
        exact = (x.double() @ linear.weight.double().T).float()
        one_by_one = torch.zeros_like(exact)
        for number in torch.randperm(size).tolist():
            one_by_one += x[:, number, None] * linear.weight[:, number]
        for found in (linear(x), one_by_one, x.flip(1) @ linear.weight.flip(1).T):
            assert_within(found, exact, bound)


@pytest.mark.parametrize("variant", [llama.VARIANTS[0], gemma3.VARIANTS[0]], ids=lambda variant: variant.architecture)
def test_a_model_with_one_weight_wrong_by_a_hundredth_is_outside_the_bound(tmp_path: Path, variant: Variant) -> None:
    reference = Reference(make_checkpoint(tmp_path, variant.family, **variant.overrides))
    tokens = prompt(33)
    before = reference.logits(tokens)
    expected, bound = distribution(reference, tokens)
    assert torch.equal(reference.logits(tokens), before), "the weights are not what they were"
    for name, parameter in reference.model.named_parameters():
        weight = parameter[tokens[0]] if "embed" in name else parameter.view(-1)
        right = weight.clone()
        with torch.no_grad():
            weight[weight.abs().argmax()] *= 1.01
            with pytest.raises(AssertionError, match="outside their bounds"):
                assert_within(reference.logits(tokens).log_softmax(-1), expected, bound)
            weight.copy_(right)


def test_larger_errors_than_those_of_float32_are_found_by_the_exact_result(tmp_path: Path) -> None:
    variant, tokens = llama.VARIANTS[0], prompt(33)
    reference = Reference(make_checkpoint(tmp_path, variant.family, **variant.overrides))

    def compute() -> torch.Tensor:
        return reference.logits(tokens).log_softmax(-1)

    before = compute()
    exact = in_float64(reference.model, compute)
    assert torch.equal(compute(), before), "the weights are not what they were"
    error = float((before - exact).abs().max())
    assert 0 < error < 1e-4, "float32 would not differ from float64"
    assert_as_exact(before.clone(), before, exact)
    for wrong in (before + 5 * error, before + 2e-4):
        with pytest.raises(AssertionError, match="where the reference"):
            assert_as_exact(wrong, before, exact)


def test_a_bound_that_excludes_nothing_is_refused() -> None:
    linear = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([1e6, -1e6, 1.0, 0.0]))
    with torch.inference_mode(), pytest.raises(ValueError, match="half of the rows move by"):
        with_bound(linear, lambda: linear(torch.ones(1, 4)))


def test_what_is_no_number_is_outside_every_bound() -> None:
    for bound in (1.0, torch.inf):
        with pytest.raises(AssertionError, match="1 of 2 elements"):
            assert_within(torch.tensor([1.0, torch.nan]), torch.ones(2), torch.tensor(bound))
