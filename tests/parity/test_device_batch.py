"""Persistent arrays of the device: block tables and last tokens by slot, of which steps send only changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from engine.runner.device import HostDevice, Uploads
from engine.runner.device_batch import DeviceBatch, DeviceBlockTables
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.parity.ahead import Ahead, answers, waiting
from tests.parity.delayed_device import DelayedDevice
from tests.parity.paged_torch import CapturedTorchBackend
from tests.parity.runners import rebuilt
from tests.parity.test_deferred_output import sequences
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import NUM_BLOCKS, VOCAB_SIZE, checkpoint, prompts, runner_for

__all__ = ["checkpoint", "prompts"]


@pytest.fixture
def on_gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", CapturedTorchBackend)
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_batched_tokens": 24, "num_kvcache_blocks": 16},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
    ],
    ids=["plain", "preempted", "few_slots"],
)
def test_tables_on_the_device_give_the_tokens_of_tables_on_the_host(
    checkpoint: Path, prompts: list[list[int]], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(waiting(runner_for(checkpoint, **fields), sequences(prompts[:8])))
    monkeypatch.setattr(loaded_model, "select_backend", CapturedTorchBackend)
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1)
    runner = runner_for(checkpoint, compilation_config={"cudagraph_capture_sizes": (2, 8)}, **fields)
    device = GraphDevice()
    runner = rebuilt(runner, device, runner.config.num_kvcache_blocks or NUM_BLOCKS)
    assert runner.tables is not None
    assert answers(waiting(runner, sequences(prompts[:8]))) == expected
    ahead = Ahead(runner)
    ahead.device = device
    runner.device_batch = DeviceBatch(device, runner.config.max_num_seqs)
    before = device.num_replayed
    assert answers(ahead.run(sequences(prompts[:8]))) == expected
    assert device.num_replayed > before


def decoding(checkpoint: Path, length: int, rows: int = 8) -> tuple[ModelRunner, Ahead]:
    """Greedy rows of prompts of `length` tokens, after their first generated tokens."""
    runner = runner_for(checkpoint, enable_prefix_caching=False)
    ahead = Ahead(runner)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    rng = np.random.default_rng(1)
    ahead.scheduler.extend(
        Sequence(rng.integers(0, VOCAB_SIZE, length).tolist(), 16, params, id=row) for row in range(rows)
    )
    for _ in range(3):
        assert ahead.pipeline.advance(ahead.on_read) is None
    return runner, ahead


@pytest.mark.usefixtures("on_gpu_path")
def test_a_decode_is_one_copy_whose_bytes_do_not_grow_with_the_context(checkpoint: Path) -> None:
    sent = []
    for length in (17, 49):
        runner, ahead = decoding(checkpoint, length)
        uploads = runner.device_batch.uploads
        copies, num_bytes = uploads.num_copies, uploads.num_bytes
        for _ in range(5):
            assert ahead.pipeline.advance(ahead.on_read) is None
        assert uploads.num_copies - copies == 5
        sent.append(uploads.num_bytes - num_bytes)
    assert sent[0] == sent[1]


def test_entries_named_twice_and_spare_rows_are_as_on_the_host() -> None:
    device = DelayedDevice()
    uploads = Uploads(device)
    tables = DeviceBlockTables(3, 4, 77, device.torch_device)
    upload = uploads.begin()
    tables.send(np.array([4, 5, 4, 11]), np.array([8, 9, 8, 2], dtype=np.int32), upload.add)
    (slots,) = upload.add([np.array([1, 3, 2])])
    upload.go()
    rows = torch.empty(3, 4, dtype=torch.int32)
    tables.gather(slots, rows)
    assert rows.tolist() == [[8, 9, 0, 0], [77] * 4, [0, 0, 0, 2]]
    first = torch.empty(3, 1, dtype=torch.int32)
    tables.gather(slots, first)
    assert first.tolist() == [[8], [77], [0]]


def test_nothing_to_send_is_no_copy() -> None:
    class Copies(HostDevice):
        is_host = False

        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            raise AssertionError("a copy of nothing")

    uploads = Uploads(Copies())
    empty, table = uploads.send([np.zeros(0, dtype=np.int64), np.zeros((4, 0), dtype=np.float32)])
    assert (empty.shape, empty.dtype, table.shape, table.dtype) == ((0,), torch.int64, (4, 0), torch.float32)
    assert uploads.num_copies == 0


def test_more_than_fits_a_buffer_goes_in_several_copies() -> None:
    device = DelayedDevice()
    uploads = Uploads(device)
    upload = uploads.begin()
    arrays = [np.arange(5000, dtype=np.int64) + nth for nth in range(4)]
    found = [upload.add([array])[0] for array in arrays]
    upload.go()
    assert uploads.num_copies > 1
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.tolist() == array.tolist()
