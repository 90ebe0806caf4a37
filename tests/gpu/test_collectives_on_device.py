"""Sums over ranks on a GPU: a graph of them is captured when no other sum is in progress, as torch reports."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.runner.device import device_of
from models.parallel.process_group import ProcessGroupCollectives, Rendezvous
from tests.gpu.places import ON_GPU, Place

REPLAYS = 3


@ON_GPU
def test_a_capture_waits_for_sums_until_they_have_ended(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device(place.device.type, 0)
    collectives = ProcessGroupCollectives(0, 1, device, Rendezvous(f"file://{tmp_path}/store", 60.0))
    collectives.join()
    try:
        # As on ROCm, on NVIDIA's too.
        monkeypatch.setattr(torch.version, "hip", torch.version.hip or "7.2")
        x = torch.ones(1 << 24, device=device)
        for _ in range(100):
            collectives.all_reduce(x)

        def run() -> None:
            collectives.all_reduce(x)
            x.add_(1)

        with collectives.capturing():
            graph = device_of(device).capture(run)
        for _ in range(REPLAYS):
            graph.replay()
        assert torch.equal(x, torch.full_like(x, 1 + REPLAYS))
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group()
