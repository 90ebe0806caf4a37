"""An installed package adds an architecture, a quantisation scheme and an attention backend, and Kaon serves them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parity.checkpoints import edit_json
from tests.parity.paged_model import PagedModel
from tests.parity.quantized_checkpoints import Pair, Tensors, write_pair

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = """
[kaon.architecture]
ToyForCausalLM = toy_kaon.model

[kaon.quantization_method]
toy-int16 = toy_kaon.scheme

[kaon.storage_layout]
toy = toy_kaon.scheme

[kaon.attention_backend]
toy = toy_kaon.attention
"""
MODEL = """
from models.architectures.llama import LlamaForCausalLM
from models.architectures.registry import ConfigFacts, architecture

@architecture("ToyForCausalLM", ConfigFacts(defaults={"rope_theta": 500.0}))
class ToyForCausalLM(LlamaForCausalLM):
    pass
"""
SCHEME = """
from models.quantization.config import METHODS, Granularity, LayerQuantConfig, QuantizationConfig
from models.quantization.layouts import STORAGE, StorageLayout

@METHODS.register("toy-int16")
def parse(section, method):
    return QuantizationConfig(method, LayerQuantConfig("toy", "int16", Granularity.TENSOR, 16))

@STORAGE.register("toy")
class Toy(StorageLayout):
    required_parts = frozenset({"codes", "factor"})

    def dequantize(self, module, parts, dtype):
        return (parts["codes"].float() * parts["factor"]).to(dtype)
"""
ATTENTION = """
import os
from pathlib import Path

from models.attention.backend import BACKENDS
from models.attention.cpu import CPUAttentionBackend

@BACKENDS.register("toy")
class Toy(CPUAttentionBackend):
    name = "toy"

    @classmethod
    def serves(cls, device):
        return device.type == "cpu"

    def forward(self, q, k, v, cache, metadata, inputs):
        Path(os.environ["TOY_SEEN"]).touch()
        return super().forward(q, k, v, cache, metadata, inputs)
"""
PROMPT, NUM_TOKENS = [5, 6, 7, 8], 8
SERVE = """
import json, os, sys
from engine.client.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams

path, prompt, count = json.loads(sys.argv[1])
params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
answers = {}
for dtype in ("float32", "bfloat16"):
    os.environ["TOY_SEEN"] = os.path.join(os.environ["TOY_FOLDER"], dtype)
    with LLMEngine(model=path, dtype=dtype, num_kvcache_blocks=32) as engine:
        (answer,) = engine.generate([prompt], params, use_tqdm=False)
    answers[dtype] = answer["token_ids"]
print(json.dumps(answers))
"""


def to_int16(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    factor = weight.abs().max() / 32767
    codes = (weight / factor).round().to(torch.int16)
    return {"codes": codes, "factor": factor.clone()}, codes.float() * factor


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory as `pip install --target` creates it."""
    site = tmp_path / "site"
    metadata, package = site / "toy_kaon-1.0.dist-info", site / "toy_kaon"
    metadata.mkdir(parents=True)
    package.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kaon\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    for name, text in {"__init__": "", "model": MODEL, "scheme": SCHEME, "attention": ATTENTION}.items():
        (package / f"{name}.py").write_text(text)
    return site


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    pair = write_pair(tmp_path, to_int16, {"quant_method": "toy-int16"}, rope_parameters={"rope_theta": 500.0})
    config = json.loads((pair.quantised / "config.json").read_text())
    del config["rope_parameters"]
    (pair.quantised / "config.json").write_text(json.dumps(config))
    edit_json(pair.quantised / "config.json", architectures=["ToyForCausalLM"])
    return pair


def test_a_package_that_is_only_installed_serves_its_own_model(installed: Path, pair: Pair, tmp_path: Path) -> None:
    """Its attention backend computes also in bfloat16, where steps are recorded with Kaon's own."""
    seen = tmp_path / "seen"
    seen.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps([str(pair.quantised), PROMPT, NUM_TOKENS])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, installed))), "TOY_FOLDER": str(seen)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["float32"] == PagedModel(pair.dense).greedy(PROMPT, NUM_TOKENS)
    assert len(answers["bfloat16"]) == NUM_TOKENS
    assert {file.name for file in seen.iterdir()} == {"float32", "bfloat16"}
