"""Devices of the GPU tests: the GPU of a machine that has one, and for the cheapest tests also Triton's interpreter,
so that tests which only run on a GPU do not rot.

A test uses the fixture `place`, and is parametrised by `ON_GPU`, or by `ANYWHERE`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.config import Config
from engine.runner.device import Device, GPUDevice
from engine.runner.model_runner import ModelRunner
from models.attention.backend import AttentionBackend, select_backend
from models.attention.triton import TritonAttentionBackend
from models.ops import triton as kernels
from tests.parity.runners import load
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.triton_interpreter import INTERPRETED

NUM_BLOCKS = 64


@dataclass(frozen=True)
class Place:
    """A device, and whether it is a GPU."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type != "cpu"

    def backend(self) -> AttentionBackend:
        """Triton's backend, whose kernels also compute for layers."""
        assert kernels.start(self.device) is None
        return select_backend(self.device) if self.is_gpu else TritonAttentionBackend(self.device)

    def device_api(self) -> Device:
        """Streams, events and graphs; in the interpreter, stand-ins that are late."""
        return GPUDevice(self.device) if self.is_gpu else GraphDevice()

    def runner(self, checkpoint: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> ModelRunner:
        """A loaded model with a cache of `NUM_BLOCKS`; it captures graphs only if sizes are given."""
        fields = {"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": 256, "max_num_seqs": 64, **fields}
        sizes = fields.pop("cudagraph_capture_sizes", ())
        fields["compilation_config"] = {"cudagraph_capture_sizes": sizes, "enforce_eager": not sizes}
        config = Config(**fields)
        assert config.num_kvcache_blocks is not None
        loaded = load(checkpoint, config, dtype, self.device, backend=self.backend(), device_api=self.device_api())
        return ModelRunner(loaded, config.num_kvcache_blocks)


HAS_GPU = torch.cuda.is_available()
_GPU = pytest.param(
    Place(torch.device("cuda", 0)),
    id="gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no GPU that torch can use")],
)
_INTERPRETER = pytest.param(
    Place(torch.device("cpu")),
    id="interpreter",
    marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here, for the GPU"),
)
_LONG_IN_INTERPRETER = pytest.param(
    *_INTERPRETER.values, id="interpreter", marks=[*_INTERPRETER.marks, pytest.mark.slow]
)
ON_GPU = pytest.mark.parametrize("place", [_GPU])
ANYWHERE = pytest.mark.parametrize("place", [_GPU, _INTERPRETER])
ANYWHERE_LONG = pytest.mark.parametrize("place", [_GPU, _LONG_IN_INTERPRETER])
"""The interpreter's tests run in the long form only."""
