"""`make locks`: writes deploy/locks, the versions and hashes that `make install` installs. Needs `uv` and an index.

One file has what serving needs, and one for each extra has its additions. They hold for every supported Python,
machine and target, since torch, with the packages that its GPU builds need, is not among them: builds for the CPU,
ROCm and CUDA have the same version and different files. `torch-cuda.txt` has the build that the index serves by
default.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "locks"
EXTRAS = ("jwt", "otel", "test", "dev", "site", "fuzz", "ops")
TORCH = re.compile(r"(torch|triton|nvidia-|cuda-)")
"""Prefixes of the names of torch and of the packages that its builds need."""
_PACKAGE = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", re.MULTILINE)
_HEADER = "# Written by `make locks`; installed by deploy/install.sh.\n"


def entries(text: str) -> dict[str, str]:
    """A lock's entries, with their markers and hashes, by name; entries of one name for several Pythons together."""
    found: dict[str, str] = {}
    for entry in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE):
        if match := _PACKAGE.match(entry):
            found[match[1]] = found.get(match[1], "") + entry
    return found


def pins(text: str) -> set[tuple[str, str]]:
    """Names and versions in a lock."""
    return {(match[1], match[2]) for match in _PACKAGE.finditer(text)}


def main() -> int:
    """Write the locks. Returns the exit code."""
    if shutil.which("uv") is None:
        sys.stderr.write("make locks needs uv, which resolves for every Python at once: pip install uv\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        # All extras together first, so that no two files disagree.
        everything = _compile(EXTRAS, ROOT / "constraints.txt")
        constraints = Path(folder, "constraints.txt")
        constraints.write_text(re.sub(r"\\\n|--hash=\S+", "", everything), encoding="utf-8")
        runtime = entries(_compile((), constraints))
        written = {"kaon": {name: text for name, text in runtime.items() if not TORCH.match(name)}}
        written["torch-cuda"] = {name: text for name, text in runtime.items() if TORCH.match(name)}
        for extra in EXTRAS:
            more = entries(_compile((extra,), constraints))
            written[extra] = {name: text for name, text in more.items() if name not in runtime}
    FOLDER.mkdir(exist_ok=True)
    for name, found in written.items():
        (FOLDER / f"{name}.txt").write_text(_HEADER + "".join(found[each] for each in sorted(found)), encoding="utf-8")
    print(*(f"{name}.txt: {len(found)} packages" for name, found in written.items()), sep="\n")
    return 0


def _compile(extras: tuple[str, ...], constraints: Path) -> str:
    options = [
        "--universal",
        "--python-version",
        "3.11",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--quiet",
    ]
    chosen = [f"--extra={extra}" for extra in extras]
    command = ["uv", "pip", "compile", "pyproject.toml", "-c", str(constraints), *options, *chosen]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
