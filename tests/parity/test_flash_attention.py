"""Long prompts by a library's attention of variable-length rows: the keys that it receives, and when it is used."""

from typing import Any

import numpy as np
import pytest
import torch

from models.ops import flash_attention
from models.ops import paged_attention as reference
from models.ops.flash_attention import LEAST_QUERIES, FlashCase, spans_of
from models.ops.self_test import first_failure
from models.ops.types import AttentionOptions

CPU = torch.device("cpu")


def by_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """The result of torch's variable-length attention, row by row: the last query attends to the last key."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    window, right = window_size
    assert right == 0
    options = AttentionOptions(scale, sliding_window=None if window < 0 else window + 1)
    out = torch.empty_like(q)
    ends = zip(query_starts.tolist()[1:], key_starts.tolist()[1:], strict=True)
    first_query = first_key = 0
    for last_query, last_key in ends:
        assert last_query - first_query <= most_queries
        assert last_key - first_key <= most_keys
        keys, values = (each[first_key:last_key].transpose(0, 1).float() for each in (k, v))
        out[first_query:last_query] = reference.attend_row(q[first_query:last_query], keys, values, options, None)
        first_query, first_key = last_query, last_key
    assert (first_query, first_key) == (len(q), len(k)), "each key is gathered for one row"
    return out


FORMS: list[tuple[dict[str, Any], torch.dtype]] = [
    ({}, torch.bfloat16),
    ({"sliding_window": 24}, torch.bfloat16),
    ({"k_scale": 0.5, "v_scale": 2.0}, torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("options", "cache_dtype"), FORMS)
def test_spans_are_given_their_own_keys(
    options: dict[str, Any], cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, and a chunk after a prefix, whose keys before the window are left out."""
    monkeypatch.setattr(flash_attention, "library", lambda: by_rows)
    case = FlashCase(4, 2, 32, AttentionOptions(0.2, **options), torch.bfloat16, cache_dtype, 16)
    assert first_failure([case], CPU) is None


def test_a_library_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It aligns a chunk's first query with its first key."""

    def aligned_at_the_top(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
        query_starts, _, most_queries, _ = rest
        return by_rows(q, k[: len(q)], v[: len(q)], query_starts, query_starts, most_queries, most_queries, **how)

    monkeypatch.setattr(flash_attention, "library", lambda: aligned_at_the_top)
    case = FlashCase(4, 2, 32, AttentionOptions(0.2), torch.bfloat16, torch.bfloat16, 16)
    assert "prompts of" in (first_failure([case], CPU) or "")


@pytest.mark.parametrize(
    ("queries", "contexts", "window", "num_keys"),
    [
        ([1, LEAST_QUERIES], [900, LEAST_QUERIES], None, LEAST_QUERIES),
        ([1, LEAST_QUERIES, 7], [900, LEAST_QUERIES, 40], None, LEAST_QUERIES + 40),
        ([1, LEAST_QUERIES - 1], [900, LEAST_QUERIES - 1], None, None),  # Short.
        ([1, LEAST_QUERIES], [900, 10 * LEAST_QUERIES], None, None),  # After a long prefix.
        ([1, LEAST_QUERIES], [900, 10 * LEAST_QUERIES], 20, LEAST_QUERIES + 19),
        ([1], [900], None, None),
    ],
)
def test_keys_are_gathered_for_long_spans_that_have_few(
    queries: list[int], contexts: list[int], window: int | None, num_keys: int | None
) -> None:
    spans = spans_of(np.array(queries), np.array(contexts), 1, window, CPU)
    assert (None if spans is None else len(spans.positions)) == num_keys
