"""The content of `/metrics` follows Prometheus' naming rules, and equals the hub's reports."""

import asyncio
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, Info, Metric, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import RequestOutput, SchedulerStats
from engine.sampling_params import SamplingParams
from engine.text.request_state import RequestState
from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.metrics import Metrics, text_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(CHECKPOINT_DIR)


def families(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def value(metrics: Metrics, sample: str, **labels: str) -> float:
    (found,) = [
        each.value
        for family in families(metrics).values()
        for each in family.samples
        if each.name == sample and labels.items() <= each.labels.items()
    ]
    return found


def stats(**fields: int | float | str | tuple[int, ...]) -> SchedulerStats:
    zeros: dict[str, object] = dict.fromkeys(SchedulerStats.__struct_fields__, 0)
    defaults = zeros | {"step_kind": "decode", "step_seconds": 0.01, "accepted_by_position": ()}
    return SchedulerStats(**{**defaults, **fields})  # type: ignore[arg-type]


def finished_state(tokenizer: Tokenizer, tokens: int) -> RequestState:
    state = RequestState(1, [5] * 7, SamplingParams(), tokenizer)
    for step in range(tokens):
        state.push(RequestOutput(1, [300], finished=step == tokens - 1, finish_reason="max_tokens", queue_time=0.25))
    return state


def lint(text: str) -> Iterator[str]:
    """The findings of `promtool check metrics`, by its documented rules."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    helped = set(re.findall(r"^# HELP (\S+) \S", text, re.M))
    for name, kind in types.items():
        if name not in helped:
            yield f"{name}: no help text"
        if ":" in name:
            yield f"{name}: colons are for recording rules"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"{name}: not in snake case"
        if (kind == "counter") != name.endswith("_total"):
            yield f"{name}: _total is for counters, and for all of them"
        if name.endswith(("_count", "_sum", "_bucket", "_info_total", "_created")):
            yield f"{name}: a reserved suffix"
        if any(part in name.split("_") for part in ("counter", "gauge", "histogram", "summary")):
            yield f"{name}: the type is no part of a name"
        if re.search(r"_(ms|milliseconds|minutes|hours|kilobytes|megabytes|kb|mb|percent)(_|$)", name):
            yield f"{name}: no base unit"
    for sample, labels in re.findall(r"^([a-z_]+)\{(.*?)\}", text, re.M):
        if 'le="' in labels and not sample.endswith("_bucket"):
            yield f"{sample}: le is for buckets"


def test_names_pass_the_rules_of_promtool() -> None:
    text = Metrics("1.2.3").render().decode()
    assert list(lint(text)) == []


def test_the_rules_find_what_they_should() -> None:
    text = "# TYPE a:b counter\n# HELP c_ms x\n# TYPE c_ms gauge\n# HELP d_total x\n# TYPE d_total gauge\n"
    assert {complaint.split(":", 1)[1][:8] for complaint in lint(text)} >= {"b: no he", " no base", " _total "}


def test_every_promised_metric_is_there_before_any_request() -> None:
    shown = families(Metrics("1.2.3"))
    expected = {
        "kaon_requests_running": "gauge",
        "kaon_requests_waiting": "gauge",
        "kaon_requests_finished": "counter",
        "kaon_prompt_tokens": "counter",
        "kaon_generation_tokens": "counter",
        "kaon_kv_cache_usage_ratio": "gauge",
        "kaon_prefix_cache_queried_tokens": "counter",
        "kaon_prefix_cache_hit_tokens": "counter",
        "kaon_preemptions": "counter",
        "kaon_time_to_first_token_seconds": "histogram",
        "kaon_time_per_output_token_seconds": "histogram",
        "kaon_request_duration_seconds": "histogram",
        "kaon_inter_token_latency_seconds": "histogram",
        "kaon_request_prompt_tokens": "histogram",
        "kaon_request_output_tokens": "histogram",
        "kaon_http_requests": "counter",
        "kaon_model_requests": "counter",
        "kaon_core_resident_memory_bytes": "gauge",
        "kaon_gpu_memory_bytes": "gauge",
        "kaon_gpu_memory_total_bytes": "gauge",
        "kaon_request_queue_seconds": "histogram",
        "kaon_step_duration_seconds": "histogram",
        "kaon_build_info": "gauge",
        "process_resident_memory_bytes": "gauge",
    }
    assert {name: shown[name].type for name in expected} == expected
    assert value(Metrics("1.2.3"), "kaon_build_info", version="1.2.3") == 1


def test_gauges_follow_the_latest_step() -> None:
    metrics = Metrics("1")
    metrics.step(stats(num_running=9, num_waiting=9, kv_blocks_used=9, kv_blocks_total=10), 1)
    metrics.step(stats(num_running=3, num_waiting=2, kv_blocks_used=4, kv_blocks_total=16), 1)
    assert value(metrics, "kaon_requests_running") == 3
    assert value(metrics, "kaon_requests_waiting") == 2
    assert value(metrics, "kaon_kv_cache_usage_ratio") == 0.25


def test_a_core_that_is_gone_runs_nothing_until_the_next_serves() -> None:
    metrics = Metrics("1", 2)
    serving = {0, 1}
    metrics.show_engine(serving=lambda: serving)
    for replica in (0, 1):
        step = stats(num_running=3, num_waiting=2, kv_blocks_used=4, kv_blocks_total=16, preemptions=1)
        metrics.step(step, 5, replica)
    serving.discard(1)
    gauges = ("kaon_requests_running", "kaon_requests_waiting", "kaon_kv_cache_usage_ratio")
    assert [value(metrics, name, replica="1") for name in gauges] == [0, 0, 0]
    assert [value(metrics, name, replica="0") for name in gauges] == [3, 2, 0.25]
    counters = ("kaon_preemptions_total", "kaon_generation_tokens_total")
    assert [value(metrics, name, replica="1") for name in counters] == [1, 5], "what it did is not forgotten"
    metrics.core_restarted(2, 1)
    serving.add(1)
    metrics.step(stats(num_running=1, preemptions=0), 1, 1)
    assert value(metrics, "kaon_requests_running", replica="1") == 1
    assert [value(metrics, name, replica="1") for name in counters] == [1, 6]


def test_the_cores_counters_are_counted_once_however_often_they_are_scraped() -> None:
    metrics = Metrics("1")
    metrics.step(stats(prefix_queried_tokens=10, prefix_hit_tokens=4, preemptions=1), 0)
    metrics.render()
    metrics.step(stats(prefix_queried_tokens=30, prefix_hit_tokens=8, preemptions=1), 0)
    metrics.render()
    assert value(metrics, "kaon_prefix_cache_queried_tokens_total") == 30
    assert value(metrics, "kaon_prefix_cache_hit_tokens_total") == 8
    assert value(metrics, "kaon_preemptions_total") == 1


def test_steps_are_timed_by_kind_and_idle_ones_not_at_all() -> None:
    metrics = Metrics("1")
    for kind in ("prefill", "decode", "decode", "idle"):
        metrics.step(stats(step_kind=kind, step_seconds=0.02), 2)
    assert value(metrics, "kaon_step_duration_seconds_count", kind="decode") == 2
    assert value(metrics, "kaon_step_duration_seconds_count", kind="prefill") == 1
    assert value(metrics, "kaon_generation_tokens_total") == 8


def test_a_request_is_counted_with_its_times(tokenizer: Tokenizer) -> None:
    metrics = Metrics("1")
    state = finished_state(tokenizer, tokens=3)
    metrics.first_token(state)
    metrics.finished(state, "length", "m")
    assert value(metrics, "kaon_prompt_tokens_total") == 7
    assert value(metrics, "kaon_request_queue_seconds_sum") == 0.25
    assert value(metrics, "kaon_requests_finished_total", reason="length") == 1
    for histogram in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert value(metrics, f"kaon_{histogram}_seconds_count") == 1
    assert value(metrics, "kaon_request_prompt_tokens_sum") == 7
    assert value(metrics, "kaon_request_output_tokens_sum") == 3
    assert value(metrics, "kaon_model_requests_total", model="m") == 1


def test_the_time_between_tokens_counts_once_a_token() -> None:
    metrics = Metrics("1")
    for _ in range(2000):
        metrics.tokens_arrived(0.0625, 1)
    metrics.tokens_arrived(0.5, 4)
    name = "kaon_inter_token_latency_seconds"
    assert value(metrics, f"{name}_count") == 2004
    assert value(metrics, f"{name}_sum") == pytest.approx(125.5)
    assert value(metrics, f"{name}_bucket", le="0.05") == 0
    assert value(metrics, f"{name}_bucket", le="0.075") == 2000
    assert value(metrics, f"{name}_bucket", le="0.15") == value(metrics, f"{name}_bucket", le="+Inf") == 2004


def test_http_requests_have_bounded_labels() -> None:
    metrics = Metrics("1")
    metrics.http_request("POST", "/v1/completions", 200)
    metrics.http_request("BREW", None, 405)
    assert value(metrics, "kaon_http_requests_total", method="POST", route="/v1/completions", status="200") == 1
    assert value(metrics, "kaon_http_requests_total", method="other", route="none", status="405") == 1


def test_memory_of_a_core_is_read_at_the_scrape_and_nan_on_another_host() -> None:
    metrics = Metrics("1", 2)
    metrics.show_engine(pids=lambda: [os.getpid(), None])
    assert value(metrics, "kaon_core_resident_memory_bytes", replica="0") > 2**20
    assert math.isnan(value(metrics, "kaon_core_resident_memory_bytes", replica="1"))


def test_memory_of_a_gpu_is_the_cores_own_figure_and_nan_on_a_cpu() -> None:
    metrics = Metrics("1", 2)
    metrics.show_engine(serving=lambda: [0, 1])
    metrics.step(stats(device_memory=3 * 2**30, device_memory_total=80 * 2**30), 1, 0)
    metrics.step(stats(), 1, 1)
    assert value(metrics, "kaon_gpu_memory_bytes", replica="0") == 3 * 2**30
    assert value(metrics, "kaon_gpu_memory_total_bytes", replica="0") == 80 * 2**30
    assert math.isnan(value(metrics, "kaon_gpu_memory_bytes", replica="1"))


def test_a_prompt_behind_which_nothing_is_generated_is_counted(tokenizer: Tokenizer) -> None:
    metrics = Metrics("1")
    state = RequestState(1, [5] * 7, SamplingParams(max_tokens=0), tokenizer)
    state.push(RequestOutput(1, [], finished=True, finish_reason="max_tokens"))
    metrics.finished(state, "length", "m")
    assert value(metrics, "kaon_prompt_tokens_total") == 7
    assert value(metrics, "kaon_time_to_first_token_seconds_count") == 0


def test_a_single_token_has_no_time_a_token(tokenizer: Tokenizer) -> None:
    metrics = Metrics("1")
    metrics.finished(finished_state(tokenizer, tokens=1), "length", "m")
    assert value(metrics, "kaon_time_per_output_token_seconds_count") == 0


def test_two_servers_in_one_process_count_apart(tokenizer: Tokenizer) -> None:
    one, other = Metrics("1"), Metrics("1")
    one.finished(finished_state(tokenizer, tokens=1), "stop", "m")
    assert value(other, "kaon_requests_finished_total", reason="stop") == 0


def test_of_several_replicas_each_reports_its_core_under_a_label() -> None:
    metrics = Metrics("1", 2)
    metrics.show_engine(serving=lambda: [0])
    metrics.step(stats(num_running=3, prefix_queried_tokens=10), 5, 0)
    metrics.step(stats(num_running=4, prefix_queried_tokens=20), 7, 1)
    metrics.core_restarted(2, 1)
    metrics.requests_moved(3, 0)
    for name, expected in (
        ("kaon_requests_running", [3, 0]),
        ("kaon_generation_tokens_total", [5, 7]),
        ("kaon_prefix_cache_queried_tokens_total", [10, 20]),
        ("kaon_core_restarts_total", [0, 1]),
        ("kaon_requests_resumed_total", [3, 2]),
        ("kaon_core_serving", [1, 0]),
    ):
        assert [value(metrics, name, replica=str(replica)) for replica in (0, 1)] == expected, name
    assert value(metrics, "kaon_step_duration_seconds_count", replica="1", kind="decode") == 1
    assert list(lint(metrics.render().decode())) == []


def test_one_core_has_no_label_and_the_names_are_the_same() -> None:
    one, several = families(Metrics("1")), families(Metrics("1", 3))
    assert one.keys() == several.keys()
    assert not any("replica" in sample.labels for family in one.values() for sample in family.samples)
    labelled = {name for name, each in several.items() if any("replica" in sample.labels for sample in each.samples)}
    assert "kaon_time_to_first_token_seconds" not in labelled
    assert len(labelled) == 21


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no rendering but the first be due at once, however long the test is interrupted."""
    clock = SimpleNamespace(monotonic=lambda: 0.0, thread_time=time.thread_time)
    monkeypatch.setattr("server.metrics.time", clock)


@pytest.mark.usefixtures("stopped_clock")
async def test_calls_that_wait_share_a_rendering_that_is_later_than_they() -> None:
    metrics = Metrics("1.2.3")
    rendered = []
    render = metrics.render
    metrics.render = lambda: rendered.append(1) or render()  # type: ignore[method-assign, func-returns-value]
    await metrics.page()
    rendered.clear()
    first = await asyncio.gather(*(metrics.page() for _ in range(100)))
    assert len(set(first)) == len(rendered) == 1
    metrics.http_request("GET", "/livez", 200)
    (later, again) = await asyncio.gather(metrics.page(), metrics.page())
    assert b'route="/livez"' in later == again
    assert len(rendered) == 2


@pytest.mark.usefixtures("stopped_clock")
async def test_a_call_is_answered_without_a_round_of_the_event_loop_if_a_rendering_is_due() -> None:
    """While a busy loop takes rounds of tens of milliseconds, each one counts."""
    metrics = Metrics("1.2.3")
    with pytest.raises(StopIteration):
        metrics.page().send(None)
    waiting = metrics.page()
    assert isinstance(waiting.send(None), asyncio.Future)
    waiting.close()


@pytest.mark.usefixtures("stopped_clock")
async def test_few_calls_get_a_rendering_in_a_round_of_the_event_loop() -> None:
    metrics, rounds, answered = Metrics("1.2.3"), 0, list[int]()

    async def ask() -> None:
        await metrics.page()
        answered.append(rounds)

    calls = [asyncio.create_task(ask()) for _ in range(50)]
    while not all(call.done() for call in calls):
        await asyncio.sleep(0)
        rounds += 1
    assert max(Counter(answered).values()) <= 2


@pytest.mark.usefixtures("stopped_clock")
async def test_who_asked_last_is_answered_first() -> None:
    metrics, answered = Metrics("1.2.3"), list[int]()

    async def ask(number: int) -> None:
        await metrics.page()
        answered.append(number)

    await metrics.page()
    await asyncio.gather(*(ask(number) for number in range(10)))
    assert answered == list(reversed(range(10)))


@pytest.mark.usefixtures("stopped_clock")
async def test_a_rendering_that_fails_fails_all_that_wait_for_it() -> None:
    metrics, handled = Metrics("1.2.3"), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: handled.append(context))
    await metrics.page()
    metrics.render = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    outcomes = await asyncio.gather(*(metrics.page() for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in outcomes] == [ZeroDivisionError] * 3


async def test_a_rendering_that_took_long_does_not_delay_the_next_for_long() -> None:
    metrics = Metrics("1.2.3")
    render = metrics.render
    metrics.render = lambda: time.sleep(0.1) or render()  # type: ignore[method-assign, func-returns-value]
    await metrics.page()
    assert metrics._next_page_at - time.monotonic() <= 0.05


async def test_a_client_that_leaves_ends_no_rendering_for_others() -> None:
    metrics = Metrics("1.2.3")
    await metrics.page()
    leaving, staying = asyncio.create_task(metrics.page()), asyncio.create_task(metrics.page())
    await asyncio.sleep(0)
    leaving.cancel()
    assert b"kaon_build_info" in await staying


def test_accepted_drafts_are_counted_by_position_and_under_the_names_of_vllm() -> None:
    metrics = Metrics("1", aliases_for="model")
    metrics.step(stats(num_drafts=4, draft_tokens=8, accepted_draft_tokens=5, accepted_by_position=(3, 2)), 9)
    metrics.render()
    metrics.step(stats(num_drafts=5, draft_tokens=10, accepted_draft_tokens=6, accepted_by_position=(4, 2)), 2)
    text = metrics.render().decode()
    assert 'kaon_accepted_draft_tokens_by_position_total{position="0"} 4.0' in text
    assert "kaon_drafts_total 5.0" in text
    labels = 'engine="0",model_name="model"'
    assert f"vllm:spec_decode_num_drafts_total{{{labels}}} 5.0" in text
    assert f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 10.0" in text
    assert f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 6.0" in text
    assert f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 2.0' in text


def test_the_text_is_that_of_the_library_for_every_type_and_value() -> None:
    registry = CollectorRegistry()
    Info("build", "With \\ and a\nline break.", registry=registry).info({"version": "1", "os": 'a "b" \\c\nd'})
    count = PrometheusCounter("requests", "By key.", ("route", "key"), registry=registry)
    for key in ("", 'quoted "x"', "back\\slash", "two\nlines", "ключ"):
        count.labels(key=key, route="/").inc(1e17)
    gauge = Gauge("ratio", "One of each.", ("of",), registry=registry)
    for number in (0.1, -1.5, 3, math.nan, math.inf, -math.inf, 1e-9, 123456789.5):
        gauge.labels(of=str(number)).set(number)
    Histogram("seconds", "Times.", buckets=(0.1, 2.5, 10), registry=registry).observe(1)
    assert text_of(registry.collect()) == generate_latest(registry)
