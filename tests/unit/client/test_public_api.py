"""The contents and the cost of `import kaon`."""

import subprocess
import sys

import kaon
from engine.client.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams


def test_the_public_names_are_the_engines() -> None:
    assert issubclass(kaon.LLM, LLMEngine)
    assert kaon.SamplingParams is SamplingParams
    assert all(hasattr(kaon, name) for name in kaon.__all__)


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, kaon; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
