"""The compiled operators; everything else of the build is in pyproject.toml.

Without a compiler they are left out, unless KAON_MUST_COMPILE is set: then a failure ends the installation. A compiler
that cannot build them for x86 ends it too.
"""

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

_CPU = Path("models/ops/cpu")
# Without debug information, which would name the folder of the build: equal sources make equal wheels anywhere.
_ARGUMENTS = ["-g0", "-O3", "-std=gnu11", "-fno-trapping-math", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi"]
if platform.machine() in ("x86_64", "AMD64"):
    _ARGUMENTS.append("-mprefer-vector-width=512")
# GCC copies 16 bytes at a time by default, and loads of 32 then wait for two stores. Other compilers refuse these.
_LONGER_COPIES = ["-mmove-max=256", "-mstore-max=256"]

_LEAST_GCC = 11  # on x86

# By which the loader sees that an editable installation's sources have changed since.
_SOURCES = sorted((*_CPU.glob("*.c"), *_CPU.glob("*.h")))
_HASH = sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()


class BuildOnSeveralCores(build_ext):
    """Runs up to four compilers at a time: one by one the files take half a minute; many take much memory."""

    def build_extensions(self) -> None:
        self._refuse_unsupported()
        compile_in_turn = self.compiler.compile
        if self._takes(_LONGER_COPIES):
            for extension in self.extensions:
                extension.extra_compile_args += _LONGER_COPIES

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
                each = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [made for objects in each for made in objects]

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def _refuse_unsupported(self) -> None:
        """Raise `PlatformError` if the compiler is not one that can build x86's operators."""
        macros = dict(line.split(" ", 2)[1:] for line in self._preprocess("-dM") or () if line.count(" ") > 1)
        if "__x86_64__" not in macros or "__linux__" not in macros:
            return
        if "__clang__" not in macros and int(macros.get("__GNUC__", 0)) >= _LEAST_GCC:
            return
        raise PlatformError(
            f"CC is {self.compiler.compiler_so[0]}, {macros.get('__VERSION__')}; only GCC from {_LEAST_GCC} on builds "
            f"Kaon's operators for x86. Install it and set CC=gcc; CC=none installs Kaon without them, and torch, "
            f"several times slower, computes instead"
        )

    def _takes(self, arguments: list[str]) -> bool:
        """Whether the compiler knows these arguments; without a compiler it does not."""
        return self._preprocess(*arguments) is not None

    def _preprocess(self, *arguments: str) -> list[str] | None:
        """The lines that the preprocessor makes of an empty file; None if it fails."""
        # All of CC: its first word may be a cache of compilers, which knows no arguments of theirs.
        command = [*getattr(self.compiler, "compiler_so", ()), *arguments, "-E", "-x", "c", os.devnull]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return run.stdout.splitlines() if run.returncode == 0 else None


# The umask decides the modes of the files in a wheel, which must not depend on who builds it.
os.umask(0o022)
setup(
    cmdclass={"build_ext": BuildOnSeveralCores},
    ext_modules=[
        Extension(
            "models.ops.cpu._library",
            sorted(str(source) for source in _CPU.glob("*.c")),
            depends=sorted(str(header) for header in _CPU.glob("*.h")),
            define_macros=[("KAON_SOURCES", f'"{_HASH}"')],
            extra_compile_args=_ARGUMENTS,
            libraries=["m", "pthread"],
            optional=not os.environ.get("KAON_MUST_COMPILE"),
        ),
    ],
)
