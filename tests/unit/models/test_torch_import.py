"""Torch is imported without its kernels for the device `meta`, until something needs them."""

import subprocess
import sys

SCRIPT = """
import gc, sys
from models.torch_import import importing_torch, load_meta_kernels
with importing_torch():
    import torch
print("torch._refs" in sys.modules, gc.isenabled())
ones = torch.ones(2, 3, device="meta")
try:
    torch.cdist(ones, ones)
except NotImplementedError:
    print("absent")
{load}
print(tuple(torch.cdist(ones, ones).shape))
"""
COMPILING = """
print(torch.compile(lambda x: torch.cdist(x, x), backend="aot_eager")(torch.ones(2, 3)).tolist())
"""


def test_the_kernels_for_meta_are_absent_until_they_are_loaded() -> None:
    run = [sys.executable, "-c", SCRIPT.format(load="load_meta_kernels(); load_meta_kernels()") + COMPILING]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == ["False True", "absent", "(2, 2)", "[[0.0, 0.0], [0.0, 0.0]]"]


def test_a_use_of_their_module_loads_them() -> None:
    run = [sys.executable, "-c", SCRIPT.format(load="torch._meta_registrations.device_hint")]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[1:] == ["absent", "(2, 2)"]
