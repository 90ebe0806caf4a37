"""OpenVINO GenAI: its continuous batching pipeline behind a thin HTTP front, since the package has no server."""

import json
from pathlib import Path

from benchmarks.peers.checkpoints import Checkpoint
from benchmarks.peers.contestant import Command, Contestant
from benchmarks.peers.environments import PEERS, install, python_of, run, versions

_FOLDER = PEERS / "openvino"
_SERVER = Path(__file__).parent / "inside" / "openvino_server.py"
_CACHE_GB = 4
_PROPERTIES = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "bf16"}
"""bf16 is what the plugin takes by itself on a processor that has it; said here so that the table is sure of it."""


class OpenVino(Contestant):
    """A model exported by optimum-intel: `fp16` weights, which the plugin turns into bf16, or `int8` ones."""

    def __init__(self, precision: str) -> None:
        self.name = "openvino" if precision == "bf16" else f"openvino-{precision}"
        self.title = f"OpenVINO GenAI, {precision}"
        self.precision = precision

    def install(self) -> None:
        """One environment exports the models and serves them; the export brings torch."""
        packages = ["openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"]
        # The registry's torchvision is built for another torch than the CPU's, and the export does not need it.
        install("openvino", packages, remove=["torchvision"])

    def version(self) -> str:
        return versions("openvino", "openvino-genai", "openvino", "optimum-intel", "transformers")

    def model(self, folder: Path) -> Path:
        return folder.with_name(f"{folder.name}-openvino-{self.precision}")

    def prepare(self, folder: Path) -> None:
        exported = self.model(folder)
        if not (exported / "exported").exists():
            weights = "fp16" if self.precision == "bf16" else self.precision
            run(
                *(str(_FOLDER / "bin" / "optimum-cli"), "export", "openvino", "--model", str(folder)),
                *("--task", "text-generation-with-past", "--weight-format", weights, str(exported)),
                environment={"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
            )
            (exported / "exported").touch()

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        arguments = (str(_SERVER), str(model), str(port), str(_CACHE_GB), json.dumps(_PROPERTIES))
        return Command((str(python_of("openvino")), "-P", *arguments), {"PYTHONPATH": ""})
