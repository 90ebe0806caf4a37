"""The environment of NCCL and RCCL, by GPU, and the condition for which a capture of their sums waits."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models.parallel import process_group as nccl
from models.parallel.process_group import ProcessGroupCollectives, Rendezvous


@pytest.mark.parametrize(
    ("hip", "arch", "before", "expected"),
    [
        ("7.2", "gfx1201", {}, "Simple"),
        ("7.2", "gfx1201", {"NCCL_PROTO": "LL"}, "LL"),
        ("7.2", "gfx942:sramecc+:xnack-", {}, None),
        (None, "", {}, None),
    ],
)
def test_rccl_keeps_to_one_protocol_on_gpus_of_gfx12_by_default(
    hip: str | None, arch: str, before: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(before)
    monkeypatch.setattr(nccl.os, "environ", environment)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))
    nccl.set_nccl_defaults(torch.device("cuda", 0))
    assert environment.get("NCCL_PROTO") == expected
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"


class Group(torch.distributed.ProcessGroup):
    """Records whether it was waited for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(0, 2)
        self._events = events

    def _wait_for_pending_works(self) -> None:
        self._events.append("no sum is under way")


@pytest.mark.parametrize(
    ("device", "hip", "waits"), [("cuda", "7.2", True), ("cuda", None, False), ("cpu", "7.2", False)]
)
def test_rccl_s_sums_have_ended_before_a_graph_is_captured(
    device: str, hip: str | None, waits: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.version, "hip", hip)
    collectives = ProcessGroupCollectives(0, 2, torch.device(device), Rendezvous(f"file://{tmp_path}/store", 1.0))
    collectives._group = Group(events)

    def capturing() -> AbstractContextManager[None]:
        events.append("aiter's sums are notified")
        return nullcontext()

    collectives._fast_sum = SimpleNamespace(capturing=capturing)
    with collectives.capturing():
        events.append("capture")
    assert events == [*(["no sum is under way"] if waits else []), "aiter's sums are notified", "capture"]
