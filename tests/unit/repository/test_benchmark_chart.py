"""The chart of README.md shows the figures of the benchmarks page."""

from xml.etree import ElementTree

import pytest

from benchmarks import chart

PAGE = """<!-- peers: A, avx2 -->
|  | Kaon, bf16 | Other |
| --- | ---: | ---: |
| 1 stream 128/128, tok/s | 19.7 | 14.5 |
| 8 streams 256/64, tok/s | 78.4 | - |
| 32 streams 256/64, tok/s | 129 | 128 |
| TTFT of 2048 tokens, s | 1.89 | 2.24 |
| 16 sharing 1024 tokens, s | 2.39 | 3.27 |
| memory, GB | 3.26 | 8.79 |

| another | table |
<!-- end of peers: A, avx2 -->
"""


def test_figures_are_those_of_the_first_table() -> None:
    servers, rows = chart.figures(PAGE)
    assert servers == ["Kaon, bf16", "Other"]
    assert rows["8 streams 256/64, tok/s"] == [78.4, None]
    assert list(rows)[-1] == "memory, GB"


def test_a_page_without_peers_is_refused() -> None:
    with pytest.raises(ValueError, match="make bench-peers"):
        chart.figures("# Benchmarks\n")


def test_the_chart_names_each_server_and_is_the_same_each_time() -> None:
    pytest.importorskip("matplotlib", reason="the chart is drawn with matplotlib: pip install -e '.[dev]'")
    drawn = chart.draw(PAGE)
    ElementTree.fromstring(drawn)
    assert b"Other" in drawn
    assert b"14.5" in drawn
    assert chart.draw(PAGE) == drawn
