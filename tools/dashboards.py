"""`python -m tools.dashboards [--check]`: writes the Grafana dashboards of deploy/grafana from the panels defined
below.

Needs the extra `kaon[ops]`. `PAGES` alone, which other modules may read, needs nothing.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.written import write_or_compare

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana"

SELECTOR = 'job=~"$job",instance=~"$instance"'
"""The selector of every query; $job and $instance are chosen at the top of a dashboard."""
WINDOW = "$__rate_interval"


class Panel(NamedTuple):
    """One chart, or with `is_stat` one number."""

    title: str
    unit: str
    queries: Mapping[str, str]
    """Queries by legend. `SEL` stands for the selector, and `WIN` for the window of rates."""
    text: str
    is_stat: bool = False
    top: float | None = None
    """The greatest possible value, if it is known."""

    @property
    def expressions(self) -> dict[str, str]:
        """The queries in PromQL with Grafana's variables, by legend."""
        return {
            legend: query.replace("SEL", SELECTOR).replace("WIN", WINDOW) for legend, query in self.queries.items()
        }


class Page(NamedTuple):
    """One dashboard: rows of panels under their titles."""

    uid: str
    title: str
    rows: Mapping[str, Sequence[Panel]]


def _rate(name: str, by: str = "", more: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{{SEL{more}}}[WIN]))"


def _quantiles(name: str) -> dict[str, str]:
    return {
        f"p{percent}": f"histogram_quantile({percent / 100}, sum by (le) (rate({name}_bucket{{SEL}}[WIN])))"
        for percent in (50, 90, 99)
    }


def _mean(name: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}_sum{{SEL}}[WIN])) / sum{grouped} (rate({name}_count{{SEL}}[WIN]))"


def _hit_ratio(by: str = "") -> str:
    hits, queries = (f"kaon_prefix_cache_{what}_tokens_total" for what in ("hit", "queried"))
    return f"{_rate(hits, by)} / {_rate(queries, by)}"


def _within(seconds: str, name: str) -> str:
    return f'sum (rate({name}_bucket{{SEL,le="{seconds}"}}[WIN])) / sum (rate({name}_count{{SEL}}[WIN]))'


_FAILED = ',reason=~"error|timeout"'
_SERVER_ERROR = ',status=~"5.."'

OVERVIEW = Page(
    "kaon-overview",
    "Kaon: overview",
    {
        "Now": [
            Panel("Servers", "short", {"up": "sum (up{SEL})"}, "Servers that answer scrapes.", is_stat=True),
            Panel(
                "Engines ready", "short", {"ready": "sum (kaon_core_serving{SEL})"}, "Of all replicas.", is_stat=True
            ),
            Panel(
                "Live requests",
                "short",
                {"live": "sum (kaon_requests_live{SEL})"},
                "Admitted, not ended.",
                is_stat=True,
            ),
            Panel(
                "Uptime",
                "s",
                {"uptime": "time() - min (process_start_time_seconds{SEL})"},
                "Of the server that started first.",
                is_stat=True,
            ),
        ],
        "Traffic": [
            Panel(
                "Requests a second, by route and status",
                "reqps",
                {"{{route}} {{status}}": _rate("kaon_http_requests_total", "route, status")},
                "499: the client left before the answer.",
            ),
            Panel(
                "Tokens a second",
                "short",
                {"prompt": _rate("kaon_prompt_tokens_total"), "generated": _rate("kaon_generation_tokens_total")},
                "Prompt tokens count when the first token is there.",
            ),
            Panel(
                "Requests ended a second, by model",
                "reqps",
                {"{{model}}": _rate("kaon_model_requests_total", "model")},
                "The model, or the adapter.",
            ),
            Panel(
                "Requests ended a second, by reason",
                "reqps",
                {"{{reason}}": _rate("kaon_requests_finished_total", "reason")},
                "`length`: at the limit of tokens; `abort`: the client left.",
            ),
        ],
        "Load": [
            Panel(
                "Requests running and waiting",
                "short",
                {"running": "sum (kaon_requests_running{SEL})", "waiting": "sum (kaon_requests_waiting{SEL})"},
                "Waiting ones have not been in a step.",
            ),
            Panel(
                "KV cache in use",
                "percentunit",
                {"{{instance}} {{replica}}": "kaon_kv_cache_usage_ratio{SEL}"},
                "Blocks that running requests hold; cached prefixes are not counted.",
                top=1,
            ),
            Panel(
                "Tokens a second, by key",
                "short",
                {"{{key}}": _rate("kaon_key_output_tokens_total", "key")},
                "Generated; `keyless`: clients without a key.",
            ),
            Panel(
                "Requests refused a second, by key",
                "reqps",
                {"{{key}}": _rate("kaon_key_refused_total", "key")},
                "With 429.",
            ),
        ],
        "Sizes": [
            Panel(
                "Prompt tokens", "short", _quantiles("kaon_request_prompt_tokens"), "Of requests that were answered."
            ),
            Panel("Generated tokens", "short", _quantiles("kaon_request_output_tokens"), "Of requests that ended."),
            Panel(
                "Memory",
                "bytes",
                {
                    "API {{instance}}": "process_resident_memory_bytes{SEL}",
                    "engine {{instance}} {{replica}}": "kaon_core_resident_memory_bytes{SEL}",
                },
                "Resident; without further ranks.",
            ),
            Panel(
                "Processor time of the API process",
                "percentunit",
                {"{{instance}}": "rate(process_cpu_seconds_total{SEL}[WIN])"},
                "Of one core.",
            ),
        ],
    },
)

LATENCY = Page(
    "kaon-latency",
    "Kaon: latency objectives",
    {
        "Objectives": [
            Panel(
                "First token within 2.5 s",
                "percentunit",
                {"share": _within("2.5", "kaon_time_to_first_token_seconds")},
                "The alerts' objective is 95 %.",
                is_stat=True,
                top=1,
            ),
            Panel(
                "Between tokens within 0.1 s",
                "percentunit",
                {"share": _within("0.1", "kaon_inter_token_latency_seconds")},
                "Each token after the first.",
                is_stat=True,
                top=1,
            ),
            Panel(
                "Answered without an error",
                "percentunit",
                {
                    "share": f"1 - {_rate('kaon_requests_finished_total', more=_FAILED)}"
                    f" / {_rate('kaon_requests_finished_total')}"
                },
                "Of requests that ended.",
                is_stat=True,
                top=1,
            ),
            Panel(
                "Share of the error budget left, 6 h",
                "percentunit",
                {"left": "clamp_min(1 - (1 - avg (kaon:ttft_good:ratio_rate6h{SEL})) / 0.05, -1)"},
                "Of the objective for the first token.",
                is_stat=True,
                top=1,
            ),
        ],
        "Distributions": [
            Panel(
                "Time to first token",
                "s",
                _quantiles("kaon_time_to_first_token_seconds"),
                "From the request's arrival.",
            ),
            Panel(
                "Between tokens", "s", _quantiles("kaon_inter_token_latency_seconds"), "Each token after the first."
            ),
            Panel("Time in the queue", "s", _quantiles("kaon_request_queue_seconds"), "Until the first step."),
            Panel("Whole request", "s", _quantiles("kaon_request_duration_seconds"), "Arrival to last token."),
        ],
        "Where the time goes": [
            Panel(
                "Mean time to first token",
                "s",
                {
                    "first token": _mean("kaon_time_to_first_token_seconds"),
                    "of it in the queue": _mean("kaon_request_queue_seconds"),
                },
                "The rest is the prefill.",
            ),
            Panel(
                "Mean time a token",
                "s",
                {"per token": _mean("kaon_time_per_output_token_seconds")},
                "After the first, of requests that ended.",
            ),
        ],
    },
)

SCHEDULER = Page(
    "kaon-scheduler",
    "Kaon: scheduler and blocks",
    {
        "Steps": [
            Panel(
                "Steps a second, by kind",
                "ops",
                {"{{kind}}": _rate("kaon_step_duration_seconds_count", "kind")},
                "`mixed`: prompts and decodes in one step.",
            ),
            Panel(
                "Duration of a step, p99, by kind",
                "s",
                {
                    "{{kind}}": "histogram_quantile(0.99, "
                    "sum by (le, kind) (rate(kaon_step_duration_seconds_bucket{SEL}[WIN])))"
                },
                "What a running stream waits for.",
            ),
            Panel(
                "Time in steps",
                "percentunit",
                {"{{kind}}": _rate("kaon_step_duration_seconds_sum", "kind")},
                "A sum of 1 an engine is a busy engine.",
            ),
            Panel(
                "Tokens a step",
                "short",
                {"tokens": f"{_rate('kaon_generation_tokens_total')} / {_rate('kaon_step_duration_seconds_count')}"},
                "Generated: the size of the batch, nearly.",
            ),
        ],
        "KV cache": [
            Panel(
                "Blocks",
                "short",
                {
                    "used": "sum (kaon_kv_cache_usage_ratio{SEL} * kaon_kv_cache_blocks{SEL})",
                    "all": "sum (kaon_kv_cache_blocks{SEL})",
                },
                "Of all engines.",
            ),
            Panel(
                "Preemptions a second",
                "ops",
                {"preemptions": _rate("kaon_preemptions_total")},
                "A running request gave its blocks to others, and is computed again.",
            ),
            Panel(
                "Prefix cache hits",
                "percentunit",
                {"hits": _hit_ratio()},
                "Share of prompt tokens that were not computed again.",
                top=1,
            ),
            Panel(
                "Accepted drafts",
                "percentunit",
                {
                    "accepted": f"{_rate('kaon_accepted_draft_tokens_total')}"
                    f" / ({_rate('kaon_draft_tokens_total')} > 0) or vector(0)"
                },
                "With speculative decoding; 0 without.",
                top=1,
            ),
        ],
    },
)

RELIABILITY = Page(
    "kaon-reliability",
    "Kaon: reliability",
    {
        "Engine": [
            Panel(
                "Engines ready",
                "short",
                {"{{instance}} {{replica}}": "kaon_core_serving{SEL}"},
                "0: it starts, and its requests wait.",
                top=1,
            ),
            Panel(
                "Restarts in 15 minutes",
                "short",
                {"{{instance}} {{replica}}": "increase(kaon_core_restarts_total{SEL}[15m])"},
                "Of engines that died.",
            ),
            Panel(
                "Requests that continued in another engine",
                "short",
                {"{{instance}} {{replica}}": "increase(kaon_requests_resumed_total{SEL}[15m])"},
                "In 15 minutes.",
            ),
            Panel(
                "Server errors a second",
                "reqps",
                {"5xx": f"{_rate('kaon_http_requests_total', more=_SERVER_ERROR)} or vector(0)"},
                "By HTTP status.",
            ),
        ],
        "Refusals": [
            Panel(
                "Requests refused a second, by reason",
                "reqps",
                {"{{reason}}": _rate("kaon_requests_rejected_total", "reason")},
                "`queue_…`: the queue is full; `quota`: the key's; `draining`: the server ends.",
            ),
            Panel(
                "Connections refused or closed a second, by reason",
                "ops",
                {"{{reason}}": _rate("kaon_connections_closed_total", "reason")},
                "`gone`: the client has gone.",
            ),
            Panel(
                "Slow readers a second",
                "ops",
                {"{{action}}": _rate("kaon_slow_readers_total", "action")},
                "Streams that were paused or ended.",
            ),
            Panel(
                "Log lines dropped",
                "short",
                {"{{instance}}": "increase(kaon_log_lines_dropped_total{SEL}[15m])"},
                "In 15 minutes: nobody reads the log.",
            ),
        ],
        "Process": [
            Panel(
                "Open files",
                "percentunit",
                {"{{instance}}": "process_open_fds{SEL} / process_max_fds{SEL}"},
                "Of the most that it may open.",
                top=1,
            ),
            Panel("Open connections", "short", {"{{instance}}": "kaon_connections_open{SEL}"}, "Of clients."),
        ],
    },
)

REPLICAS = Page(
    "kaon-replicas",
    "Kaon: replicas",
    {
        "Balance": [
            Panel(
                "Requests running", "short", {"{{instance}} {{replica}}": "kaon_requests_running{SEL}"}, "By replica."
            ),
            Panel(
                "Requests waiting", "short", {"{{instance}} {{replica}}": "kaon_requests_waiting{SEL}"}, "By replica."
            ),
            Panel(
                "Tokens a second",
                "short",
                {"{{instance}} {{replica}}": _rate("kaon_generation_tokens_total", "instance, replica")},
                "Generated.",
            ),
            Panel(
                "Time in steps",
                "percentunit",
                {"{{instance}} {{replica}}": _rate("kaon_step_duration_seconds_sum", "instance, replica")},
                "1: always busy.",
            ),
        ],
        "Cache": [
            Panel(
                "KV cache in use",
                "percentunit",
                {"{{instance}} {{replica}}": "kaon_kv_cache_usage_ratio{SEL}"},
                "By replica.",
                top=1,
            ),
            Panel(
                "Prefix cache hits",
                "percentunit",
                {"{{instance}} {{replica}}": _hit_ratio("instance, replica")},
                "Routing by prefix keeps them high.",
                top=1,
            ),
            Panel(
                "Preemptions a second",
                "ops",
                {"{{instance}} {{replica}}": _rate("kaon_preemptions_total", "instance, replica")},
                "By replica.",
            ),
            Panel(
                "Memory of the engine",
                "bytes",
                {"{{instance}} {{replica}}": "kaon_core_resident_memory_bytes{SEL}"},
                "Resident, on this host.",
            ),
        ],
    },
)


def _gpus(gpu: str, busy: str, memory: str, power: str, part: str, faults: Panel) -> list[Panel]:
    """A group of panels: `gpu` is the legend of each GPU, `part` is that of its power; the others are metrics."""
    return [
        Panel("Busy", "percent", {gpu: busy}, "Share of time with a kernel.", top=100),
        Panel("Memory in use", "decmbytes", {gpu: memory}, "Of each GPU."),
        Panel("Power", "watt", {gpu: power}, f"Of the {part}."),
        faults,
    ]


_AMD, _NVIDIA = "{{hostname}} {{gpu_id}}", "{{Hostname}} {{gpu}}"

GPUS = Page(
    "kaon-gpus",
    "Kaon: GPUs",
    {
        "AMD (device-metrics-exporter)": _gpus(
            _AMD,
            "gpu_gfx_activity",
            "gpu_used_vram",
            "gpu_package_power",
            "package",
            Panel(
                "Uncorrectable memory errors",
                "short",
                {_AMD: "gpu_ecc_uncorrect_total"},
                "Since the driver was loaded.",
            ),
        ),
        "NVIDIA (dcgm-exporter)": _gpus(
            _NVIDIA,
            "DCGM_FI_DEV_GPU_UTIL",
            "DCGM_FI_DEV_FB_USED",
            "DCGM_FI_DEV_POWER_USAGE",
            "board",
            Panel("XID errors", "short", {_NVIDIA: "DCGM_FI_DEV_XID_ERRORS"}, "Number of the last one; 0: none."),
        ),
    },
)

PAGES = (OVERVIEW, LATENCY, SCHEDULER, RELIABILITY, REPLICAS, GPUS)


def rendered(page: Page) -> str:
    """The dashboard's JSON."""
    from grafana_foundation_sdk.builders import dashboard
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, VariableRefresh

    builder = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .tags(["kaon"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(dashboard.DashboardLink("Kaon").tags(["kaon"]).as_dropdown(True).keep_time(True).include_vars(True))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, of in (("job", "kaon_build_info"), ("instance", 'kaon_build_info{job=~"$job"}')):
        builder.with_variable(
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(_source())
            .query(f"label_values({of}, {name})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
        )
    for title, panels in page.rows.items():
        builder.with_row(dashboard.Row(title))
        for panel in panels:
            builder.with_panel(_built(panel, 24 // len(panels) if panel.is_stat else 12))
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(builder.build())
    return text + "\n"


def _source() -> Any:  # The package is installed only where dashboards are rendered.
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    return DataSourceRef(type_val="prometheus", uid="${datasource}")


def _built(panel: Panel, width: int) -> Any:
    from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries

    if panel.is_stat:
        built = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    else:
        built = timeseries.Panel().fill_opacity(10).show_points("never")
    built.title(panel.title).description(panel.text).unit(panel.unit).datasource(_source()).span(width).min(0)
    built.height(4 if panel.is_stat else 8)
    if panel.top is not None:
        built.max(panel.top)
    for legend, expression in panel.expressions.items():
        built.with_target(prometheus.Dataquery().expr(expression).legend_format(legend))
    return built


def files() -> Iterator[tuple[Path, str]]:
    """The files with their contents."""
    for page in PAGES:
        yield FOLDER / f"{page.uid}.json", rendered(page)


def main(arguments: Sequence[str]) -> int:
    """Write or check the files. Returns the exit code."""
    return write_or_compare(dict(files()), arguments, "python -m tools.dashboards")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
