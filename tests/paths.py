"""`make test-paths`: the parity tests with each set of instructions that this processor can be made to use.

Libraries choose their code by the processor, and with it the order in which they add: a tolerance must fit them all.
`--path NAME`, which may be repeated, runs these paths only. Other arguments are pytest's, such as the tests to run
instead of tests/parity. Exits with 1 if a test fails on any path.
"""

import argparse
import os
import subprocess
import sys

PATHS = {
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "torch without Kaon's operators": {"KAON_TEST_OPERATORS": "none"},
    "AVX-512 without AMX": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_CBWR": "AVX512",
        "KAON_TEST_OPERATORS": "avx512_bf16",
    },
    "AVX-512 without bfloat16": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_CBWR": "AVX512",
        "KAON_TEST_OPERATORS": "avx512",
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "KAON_TEST_OPERATORS": "avx2",
    },
    "SSE": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "KAON_TEST_OPERATORS": "portable",
    },
}
"""What each adds to the environment of `make test`. What the processor lacks, the libraries ignore.

MKL computes torch's float32 products, oneDNN those of bfloat16, ATen the rest of torch; KAON_TEST_OPERATORS limits
Kaon's own operators (tests/parity/conftest.py).
"""


INDEPENDENT = ("test_triton_*", "test_cpu_sanitized*", "test_cpu_emulated*", "test_kernel_build*", "test_models_docs*")
"""Tests whose result the libraries' instruction sets do not change: they run on the first path only."""


def main() -> int:
    """Run pytest once for each path."""
    parser = argparse.ArgumentParser(prog="make test-paths")
    parser.add_argument("--path", action="append", choices=PATHS, dest="paths")
    options, given = parser.parse_known_args()
    arguments = given or ["tests/parity", "-m", "not slow and not gpu"]
    failed, paths = [], {name: PATHS[name] for name in options.paths or PATHS}
    for name, environment in paths.items():
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *arguments]
        if name != next(iter(PATHS)):
            command += [f"--ignore-glob=*/{files}" for files in INDEPENDENT]
        settings = " ".join(f"{key}={value}" for key, value in environment.items())
        sys.stdout.write(f"\n{name}: {settings}\n")
        sys.stdout.flush()
        if subprocess.run(command, env={**os.environ, **environment}, check=False).returncode:
            failed.append(name)
    sys.stdout.write(f"\nfailed: {', '.join(failed)}\n" if failed else f"\nall {len(paths)} paths passed\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
