"""The model of step durations finds the device's coefficients, and neither outliers nor idleness mislead it."""

import random

import pytest

from engine.core.step_time import StepTimeModel, StepWork
from tests.simulated_engine import device

DEVICE = device(0.05, 0.001, decode=0.002, pair=2e-7, key=1e-6)
PROMPTS = StepWork(prompt_tokens=400, prompt_pairs=400 * 1500)
DECODES = StepWork(decode_tokens=32, decode_keys=32 * 800)
BOTH = StepWork(1.0, 300, 16, 300 * 700, 16 * 300)


def random_work(choice: random.Random) -> StepWork:
    tokens, decodes = choice.choice([0, choice.randrange(1, 600)]), choice.randrange(64)
    return StepWork(1.0, tokens, decodes, tokens * choice.randrange(4000), decodes * choice.randrange(2000))


def trained(noise: float = 0.0, outliers: float = 0.0, steps: int = 300) -> StepTimeModel:
    choice, model = random.Random(1), StepTimeModel(0.5)
    for _ in range(steps):
        work = random_work(choice)
        factor = 20.0 if choice.random() < outliers else 1.0 + noise * choice.uniform(-1, 1)
        model.observe(work, DEVICE(work) * factor)
    return model


@pytest.mark.parametrize("work", [PROMPTS, DECODES, BOTH])
@pytest.mark.parametrize(("noise", "outliers", "within"), [(0.0, 0.0, 0.02), (0.2, 0.0, 0.1), (0.1, 0.05, 0.35)])
def test_predictions_follow_the_device_through_noise_and_outliers(
    work: StepWork, noise: float, outliers: float, within: float
) -> None:
    model = trained(noise, outliers)
    assert model.seconds(work) <= (1 + within) * DEVICE(work)
    assert model.seconds(work) * (1 + model.excess) == pytest.approx(DEVICE(work), rel=within)


def test_a_device_that_becomes_slower_for_good_is_believed_within_some_steps() -> None:
    model = trained()
    for _ in range(40):
        model.observe(BOTH, 4 * DEVICE(BOTH))
    assert model.seconds(BOTH) == pytest.approx(4 * DEVICE(BOTH), rel=0.1)


def test_how_much_longer_disturbed_steps_take_is_known() -> None:
    assert trained().excess < 0.02
    assert 0.2 < trained(noise=1.0).excess < 1.5


def test_steps_that_other_work_delays_do_not_raise_what_undisturbed_ones_are_predicted_to_take() -> None:
    choice, model = random.Random(2), trained()
    for _ in range(2000):
        work = random_work(choice)
        delay = choice.expovariate(1 / 0.3) if choice.random() < 0.6 else 0.0
        model.observe(work, DEVICE(work) + delay)
    assert model.seconds(StepWork()) <= 2 * DEVICE(StepWork())
    assert model.seconds(BOTH) == pytest.approx(DEVICE(BOTH), rel=0.3)


def test_many_equal_decodes_do_not_change_what_is_known_of_prompts() -> None:
    model = trained()
    for _ in range(5000):
        model.observe(DECODES, DEVICE(DECODES))
    assert model.seconds(PROMPTS) == pytest.approx(DEVICE(PROMPTS), rel=0.05)


@pytest.mark.parametrize("start", [0, 3000])
def test_as_many_tokens_are_planned_as_the_time_suffices_for(start: int) -> None:
    model = trained()
    count = model.prompt_tokens(start, 0.3, 0)
    assert model.prompt_seconds(start, count) == pytest.approx(0.3, rel=0.01)
    assert model.prompt_tokens(start, 0.0, 0) == 0


def test_steps_grow_only_as_prompts_are_measured() -> None:
    model, sizes = StepTimeModel(0.5), []
    for _ in range(4):
        sizes.append(model.prompt_tokens(0, 1e9, 0))
        model.observe(StepWork(prompt_tokens=sizes[-1]), 1e-4)
    assert sizes == [64, 256, 1024, 4096]
    assert model.prompt_tokens(0, 1e9, 16_000) == 4 * 4096 - 16_000
