"""Quotas per minute: when they are exhausted, how answers report them, and that the average always holds."""

import pytest

from server.limits.accounts import Accounts
from server.limits.admission import Admission, Limits
from server.limits.owners import Owner, Quotas
from server.limits.quotas import QuotaExceeded, QuotaMeter
from server.metrics import Metrics

ALICE, BOB = Owner.of_key("a" * 64), Owner.of_key("b" * 64)


class Shop:
    """An admission with quotas and a clock of its own."""

    def __init__(self, *defaults: int | None) -> None:
        self.now = 0.0
        self.accounts = Accounts()
        self.metrics = Metrics("1")
        self.quotas = QuotaMeter(self.accounts, Quotas(*defaults), lambda: self.now)
        self.admission = Admission(Limits(), self.metrics, self.accounts, self.quotas, lambda: self.now)

    def ask(self, owner: Owner, prompt_tokens: int = 1, output_tokens: int = 0) -> QuotaExceeded | None:
        """Send a request that ends immediately. Returns the reason if it was refused."""
        try:
            tally = self.admission.admit(owner, [prompt_tokens])
        except QuotaExceeded as error:
            return error
        tally.output_tokens += output_tokens
        self.admission.release(owner)
        return None

    def headers(self, owner: Owner) -> dict[str, str]:
        return {
            name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in self.quotas.headers(owner)
        }


def seconds(error: QuotaExceeded) -> float:
    return int(error.headers["retry-after-ms"]) / 1000


def test_a_minutes_requests_are_admitted_and_the_next_one_is_a_429_that_says_when() -> None:
    shop = Shop(60)
    assert [shop.ask(ALICE) for _ in range(60)] == [None] * 60
    error = shop.ask(ALICE)
    assert error is not None
    assert (error.status, error.type, error.code) == (429, "requests", "rate_limit_exceeded")
    assert "limit 60, remaining 0, requested 1 (requests_per_minute)" in str(error)
    assert seconds(error) == 1
    assert shop.ask(BOB) is None
    shop.now += seconds(error)
    assert shop.ask(ALICE) is None
    assert shop.ask(ALICE) is not None
    assert shop.accounts.tally(ALICE).counts() == {
        "requests": 61, "refused": 2, "prompt_tokens": 61, "output_tokens": 0
    }  # fmt: skip
    assert 'kaon_requests_rejected_total{reason="quota"} 2.0' in shop.metrics.render().decode()


def test_prompts_use_up_their_quota_and_a_longer_one_than_a_minutes_needs_a_full_bucket() -> None:
    shop = Shop(None, 600)
    assert shop.ask(ALICE, 500) is None
    error = shop.ask(ALICE, 200)
    assert error is not None
    assert (error.type, seconds(error)) == ("tokens", 10)
    shop.now += 10
    assert shop.ask(ALICE, 200) is None
    assert shop.ask(ALICE, 5000) is not None
    shop.now += 60
    assert shop.ask(ALICE, 5000) is None
    error = shop.ask(ALICE, 1)
    assert error is not None
    assert seconds(error) == pytest.approx((5000 - 600 + 1) / 10, abs=0.01)


def test_output_is_subtracted_as_it_is_generated_so_that_the_average_holds() -> None:
    shop = Shop(None, None, 600)
    assert shop.ask(ALICE, output_tokens=1800) is None
    error = shop.ask(ALICE)
    assert error is not None
    assert seconds(error) == pytest.approx(120.1)
    generated = 1800
    for _ in range(600):
        shop.now += 1
        if shop.ask(ALICE, output_tokens=100) is None:
            generated += 100
    assert generated <= 600 + shop.now * 10 + 100
    assert generated >= shop.now * 10


def test_a_keys_own_quotas_take_the_place_of_the_servers() -> None:
    shop = Shop(1, None, 1000)
    rich = ALICE._replace(quotas=Quotas(5, 100, None))
    assert shop.quotas.quotas_of(rich) == Quotas(5, 100, 1000)
    assert [shop.ask(rich) for _ in range(5)] == [None] * 5
    assert shop.ask(rich) is not None
    assert shop.ask(BOB) is None
    assert shop.ask(BOB) is not None
    richer = rich._replace(quotas=Quotas(8, 100, None))
    assert [shop.ask(richer) for _ in range(3)] == [None] * 3
    assert shop.ask(richer) is not None


def test_headers_are_openais_and_tokens_are_those_of_which_less_is_left() -> None:
    shop = Shop(60, 6000, 600)
    assert shop.ask(ALICE, 3000, 60) is None
    assert shop.headers(ALICE) == {
        "limit-requests": "60",
        "remaining-requests": "59",
        "reset-requests": "1s",
        "limit-tokens": "6000",
        "remaining-tokens": "3000",
        "reset-tokens": "30s",
    }
    assert shop.ask(ALICE, 1, 1200) is None
    left = shop.headers(ALICE)
    assert (left["limit-tokens"], left["remaining-tokens"], left["reset-tokens"]) == ("600", "0", "2m6s")
    assert Shop().headers(ALICE) == {}
    assert Shop(60).headers(BOB)["reset-requests"] == "0ms"


def test_the_meter_stays_small_and_forgets_no_debt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.limits.quotas._MAX_BUCKETS", 50)
    monkeypatch.setattr("server.limits.accounts._MAX_TALLIES", 50)
    shop = Shop(60)
    for _ in range(60):
        shop.ask(ALICE)
    for number in range(1000):
        shop.now += 0.0001
        shop.quotas.check(Owner.of_address(f"10.0.{number % 256}.{number // 256}"), 1)
    assert len(shop.quotas._kept) <= 52
    assert len(list(shop.accounts.tallies())) <= 51
    assert shop.ask(ALICE) is not None
