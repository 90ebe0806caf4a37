"""The compiled operators; everything else of the build is in pyproject.toml. Without a compiler they are left out."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "models.kernels._native",
            ["models/kernels/grouped_linear.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
