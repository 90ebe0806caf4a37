"""The compiled operators; everything else of the build is in pyproject.toml. Without a compiler they are left out."""

from pathlib import Path

from setuptools import Extension, setup

_CPU = Path("models/kernels/cpu")
_ARGUMENTS = ["-O3", "-std=gnu11"]

setup(
    ext_modules=[
        Extension(
            "models.kernels._native",
            ["models/kernels/grouped_linear.c"],
            extra_compile_args=_ARGUMENTS,
            optional=True,
        ),
        Extension(
            "models.kernels.cpu._library",
            sorted(str(source) for source in _CPU.glob("*.c")),
            depends=sorted(str(header) for header in _CPU.glob("*.h")),
            # A product and a sum are rounded one after the other everywhere: results depend on no instruction set.
            extra_compile_args=[*_ARGUMENTS, "-ffp-contract=off"],
            libraries=["m"],
            optional=True,
        ),
    ]
)
