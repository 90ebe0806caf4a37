"""Predicted times at which a full queue has room: from the measured rate, with earlier promises counted."""

import itertools

import pytest

from server.limits.admission import LATEST_SECONDS, QueueForecast

MARGIN = 1.2


def draining(per_second: int, seconds: int = 60, tokens: int = 100) -> QueueForecast:
    """Pretend that for `seconds` one sequence left at each interval while others waited."""
    forecast = QueueForecast()
    forecast.start_busy(0.0)
    for second in range(1, seconds + 1):
        forecast.served(float(second), per_second, per_second * tokens)
    return forecast


@pytest.mark.parametrize("per_second", [1, 10, 500])
def test_the_time_is_what_must_leave_by_the_measured_rate(per_second: int) -> None:
    seconds = draining(per_second).retry_after(60.0, excess=10, sequences=1, excess_tokens=0, tokens=5)
    assert seconds == pytest.approx(max(0.05, MARGIN * 10 / per_second), rel=0.1)


def test_tokens_have_a_rate_of_their_own_and_the_later_time_counts() -> None:
    seconds = draining(10, tokens=100).retry_after(60.0, excess=1, sequences=1, excess_tokens=5000, tokens=5000)
    assert seconds == pytest.approx(MARGIN * 5.0, rel=0.1)


def test_further_clients_get_later_times_at_the_pace_at_which_the_queue_empties() -> None:
    forecast = draining(10)
    times = [forecast.retry_after(60.0, excess=1, sequences=1, excess_tokens=0, tokens=5) for _ in range(20)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(MARGIN * 2.0, rel=0.1)
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) > 0.05


def test_a_promise_counts_until_its_time_has_come() -> None:
    forecast = draining(10)
    first = forecast.retry_after(60.0, excess=5, sequences=5, excess_tokens=0, tokens=0)
    assert forecast.retry_after(60.1, excess=1, sequences=1, excess_tokens=0, tokens=0) > first
    forecast.served(61.0, 10, 0)
    assert forecast.retry_after(62.0, excess=1, sequences=1, excess_tokens=0, tokens=0) < first


def test_an_idle_time_does_not_look_like_a_slow_one() -> None:
    forecast = draining(10)
    forecast.end_busy(60.0)
    forecast.start_busy(5000.0)
    seconds = forecast.retry_after(5000.0, excess=10, sequences=1, excess_tokens=0, tokens=5)
    assert seconds == pytest.approx(MARGIN, rel=0.1)


def test_the_rate_follows_a_change_within_half_a_minute() -> None:
    forecast = draining(100)
    for second in range(61, 91):
        forecast.served(float(second), 10, 1000)
    seconds = forecast.retry_after(90.0, excess=10, sequences=1, excess_tokens=0, tokens=5)
    assert 0.6 < seconds < 1.3


def test_an_engine_that_stands_still_is_reported_at_the_latest_time_and_promises_nothing() -> None:
    forecast = draining(10)
    reported = [forecast.retry_after(1000.0, excess=1, sequences=1, excess_tokens=0, tokens=5) for _ in range(3)]
    assert reported == [LATEST_SECONDS] * 3
    forecast.served(1000.0, 100_000, 0)
    assert forecast.retry_after(1000.0, excess=1, sequences=1, excess_tokens=0, tokens=5) < 1


def after_refusals(count: int) -> QueueForecast:
    """Requests were refused at 60.0, one is due every 0.12 s, and none waits any more."""
    forecast = draining(10)
    for _ in range(count):
        forecast.retry_after(60.0, excess=1, sequences=1, excess_tokens=0, tokens=5)
    forecast.end_busy(60.0)
    return forecast


def reported(forecast: QueueForecast, now: float) -> float:
    """The time for a request that is refused just when the queue has been filled."""
    forecast.start_busy(now)
    seconds = forecast.retry_after(now, excess=1, sequences=1, excess_tokens=0, tokens=5)
    forecast.end_busy(now)
    return seconds


SOON = MARGIN * 0.11


@pytest.mark.parametrize("of_ten", [10, 8, 5, 2, 0])
def test_promises_that_too_few_come_for_are_forgotten(of_ten: int) -> None:
    forecast = after_refusals(200)
    for number in range(100):
        if number % 10 < of_ten:
            forecast.admitted(60.05 + 0.12 * (number + 1), 1)
    seconds = reported(forecast, 72.1)
    if of_ten >= 8:
        assert seconds == pytest.approx(MARGIN * 10.0, rel=0.1)
    else:
        assert seconds < SOON


def test_clients_that_round_their_time_up_are_waited_for() -> None:
    forecast = after_refusals(200)
    for second in range(1, 13):
        for _ in range(8):
            forecast.admitted(60.05 + second, 1)
    assert reported(forecast, 72.1) == pytest.approx(MARGIN * 10.0, rel=0.1)


def test_many_that_come_at_once_are_not_taken_for_those_who_stayed_away() -> None:
    forecast = after_refusals(200)
    forecast.admitted(66.0, 50)
    assert reported(forecast, 66.0) < SOON


def test_surplus_retries_do_not_count_for_reservations_made_later() -> None:
    forecast = after_refusals(200)
    forecast.admitted(61.0, 1000)
    assert reported(forecast, 66.0) < SOON


def test_a_few_that_stay_away_prove_nothing_nor_does_a_moment() -> None:
    assert reported(after_refusals(200), 62.0) == pytest.approx(MARGIN * 18.4, rel=0.1)
    forecast = draining(1)
    for _ in range(10):
        forecast.retry_after(60.0, excess=1, sequences=1, excess_tokens=0, tokens=5)
    forecast.end_busy(60.0)
    assert reported(forecast, 66.0) == pytest.approx(MARGIN * 6.0, rel=0.1)


def test_owners_that_never_return_are_forgotten_and_looked_for_seldom() -> None:
    forecast = draining(10)
    for number in range(20_000):
        now = 60.0 + 0.01 * number
        forecast.retry_after(now, excess=1, sequences=1, excess_tokens=0, tokens=5, party=f"address {number}")
    assert len(forecast._reservations) <= 2 * 1024 + 1


def test_before_anything_was_measured_times_are_short_and_apart() -> None:
    forecast = QueueForecast()
    forecast.start_busy(0.0)
    times = [forecast.retry_after(0.0, excess=1, sequences=1, excess_tokens=0, tokens=5) for _ in range(3)]
    assert times == pytest.approx([MARGIN * each for each in (0.05, 0.1, 0.15)])
