"""The compiled operators; everything else of the build is in pyproject.toml. Without a compiler they are left out."""

import platform
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

_CPU = Path("models/kernels/cpu")
_ARGUMENTS = ["-O3", "-std=gnu11", "-fno-trapping-math", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi"]
if platform.machine() in ("x86_64", "AMD64"):
    _ARGUMENTS.append("-mprefer-vector-width=512")

# By which the loader sees that an editable installation's sources have changed since.
_SOURCES = sorted((*_CPU.glob("*.c"), *_CPU.glob("*.h")))
_HASH = sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()

setup(
    ext_modules=[
        Extension(
            "models.kernels.cpu._library",
            sorted(str(source) for source in _CPU.glob("*.c")),
            depends=sorted(str(header) for header in _CPU.glob("*.h")),
            define_macros=[("KAON_SOURCES", f'"{_HASH}"')],
            extra_compile_args=_ARGUMENTS,
            libraries=["m", "pthread"],
            optional=True,
        ),
    ]
)
