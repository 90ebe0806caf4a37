"""Sums over ranks by `aiter` are tried in processes of all ranks, and used if all ranks find them correct."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models.ops import aiter
from models.ops.aiter import all_reduce as reduce
from models.ops.aiter import library as bindings
from models.parallel.process_group import ProcessGroupCollectives, Rendezvous
from tests.aiter_library import Library, library

__all__ = ["library"]

CPU = torch.device("cpu")
FILE = "dist/device_communicators/custom_all_reduce.py"


class FakeSum:
    """Leaves sums of groups of three to other libraries."""

    is_capturing = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if len(x) == 3 else 2 * x

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.is_capturing = True
        yield


def tried_out(store: Path) -> list[str | None]:
    """The errors that two ranks find."""
    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(lambda rank: reduce.try_out(rank, 2, CPU, store, 300.0), range(2)))


@pytest.mark.usefixtures("library")
def test_ranks_find_sums_right(tmp_path: Path) -> None:
    assert tried_out(tmp_path / "store") == [None, None]


def test_ranks_find_sums_wrong_or_missing(library: Library, tmp_path: Path) -> None:
    library.replace(FILE, ("        return out\n", "        return out + (dist.get_rank() == 1) * (len(out) > 8)\n"))
    assert tried_out(tmp_path / "store") == [None, "its sum of 4096 elements over 2 ranks is off by 1"]


def test_a_rank_whose_process_is_ended_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reduce.sys, "executable", str(tmp_path / "interpreter"))
    for script, words in (
        ("kill -SEGV $$", "its sums over 2 ranks were ended by signal 11"),
        ("exec sleep 60", "its sums over 2 ranks took longer than 1 s"),
        ("echo HIP error >&2; exit 1", "HIP error"),
        ("exit 1", "its sums over 2 ranks ended with exit code 1"),
    ):
        (tmp_path / "interpreter").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "interpreter").chmod(0o755)
        seconds = 1.0 if "sleep" in script else 300.0
        assert reduce.try_out(0, 2, CPU, tmp_path / "store", seconds) == words


def test_all_ranks_leave_sums_to_rccl_where_one_found_them_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reduce, "try_out", lambda *_: None)
    agreed: list[bool] = []

    def agree(is_so: bool) -> bool:
        agreed.append(is_so)
        return False

    assert reduce.join(0, 2, CPU, tmp_path / "store", agree) is None
    assert agreed == [True]
    assert "all_reduce by RCCL (not aiter: another rank found it wrong)" in caplog.text


@pytest.mark.usefixtures("library")
def test_a_sum_that_the_library_does_not_take_is_another_s() -> None:
    bindings.bind("all_reduce")
    found = SimpleNamespace(
        disabled=False, custom_all_reduce=lambda x: None if len(x) > 4 else 2 * x, capture=nullcontext
    )
    bindings._bound["CustomAllreduce"] = lambda *_, **__: found
    fast = reduce.FastSum(SimpleNamespace(), CPU)
    x = torch.ones(4, dtype=torch.bfloat16)
    assert torch.equal(fast(x), 2 * x)
    assert fast(x.float()) is None
    assert fast(x.repeat(2)) is None
    found.disabled = True
    with pytest.raises(RuntimeError, match="has none for these GPUs"):
        reduce.FastSum(SimpleNamespace(), CPU)


def test_a_release_whose_sums_cannot_be_in_a_graph_is_not_used() -> None:
    bindings._bound["CustomAllreduce"] = lambda *_, **__: SimpleNamespace(disabled=False)
    try:
        with pytest.raises(RuntimeError, match="sums of this release cannot be in graphs"):
            reduce.FastSum(SimpleNamespace(), CPU)
    finally:
        bindings.forget()


@pytest.mark.usefixtures("library")
def test_ranks_exchange_a_graph_s_sums_only_if_all_have_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    bindings.bind("all_reduce")
    reported = []

    class Sums:
        disabled = False

        def custom_all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
            return None if self.disabled else 2 * x

        @contextmanager
        def capture(self) -> Iterator[None]:
            try:
                yield
            finally:
                if not self.disabled:
                    reported.append("reported")

    bindings._bound["CustomAllreduce"] = lambda *_, **__: Sums()
    fast = reduce.FastSum(SimpleNamespace(), CPU)
    x = torch.ones(4, dtype=torch.bfloat16)
    with fast.capturing():
        assert reported == []
    assert reported == ["reported"]
    assert fast(x) is not None
    failure = RuntimeError("another rank failed to")
    with pytest.raises(RuntimeError) as raised, fast.capturing():
        raise failure
    assert raised.value is failure
    assert reported == ["reported"]
    assert fast(x) is None
    assert "all_reduce by RCCL (not aiter: a graph of its sums was not captured)" in caplog.text


@pytest.mark.usefixtures("library")
def test_a_graph_whose_sums_the_library_cannot_register_fails_in_a_sentence() -> None:
    bindings.bind("all_reduce")
    # As in a group of two, of which this process is both ranks and has announced other sums.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_world_size", lambda group: 2)
        patch.setattr("torch.distributed.all_gather", lambda reported, own, group: reported[1].copy_(own))
        fast = reduce.FastSum(SimpleNamespace(), CPU)
        x = torch.ones(4, dtype=torch.bfloat16)
        with (
            pytest.raises(
                RuntimeError, match="aiter's sums cannot be in a graph: AssertionError: ranks captured other"
            ),
            fast.capturing(),
        ):
            assert torch.equal(fast(x), torch.zeros(4)), "nothing runs while a graph is captured"


def test_a_group_takes_the_fast_sum_and_else_the_slow_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group = ProcessGroupCollectives(0, 2, CPU, Rendezvous(f"file://{tmp_path}/store", 1.0))
    slow: list[torch.Tensor] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x, group: slow.append(x))
    x = torch.ones(3)
    assert group.all_reduce(x) is x
    with group.capturing():
        """RCCL's sums need no setup."""
    group._fast_sum = FakeSum()
    assert group.all_reduce(x) is x
    assert torch.equal(group.all_reduce(torch.ones(4)), torch.full((4,), 2.0))
    assert len(slow) == 2
    with group.capturing():
        assert group._fast_sum.is_capturing
    assert not aiter.takes("all_reduce")
