"""What the environment of NCCL and RCCL gets, on which GPU."""

from types import SimpleNamespace

import pytest
import torch

from models import nccl


@pytest.mark.parametrize(
    ("hip", "arch", "before", "expected"),
    [
        ("7.2", "gfx1201", {}, "Simple"),
        ("7.2", "gfx1201", {"NCCL_PROTO": "LL"}, "LL"),
        ("7.2", "gfx942:sramecc+:xnack-", {}, None),
        (None, "", {}, None),
    ],
)
def test_rccl_keeps_to_one_protocol_on_gpus_of_gfx12_unless_told(
    hip: str | None, arch: str, before: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(before)
    monkeypatch.setattr(nccl.os, "environ", environment)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))
    nccl.prepare(torch.device("cuda", 0))
    assert environment.get("NCCL_PROTO") == expected
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
