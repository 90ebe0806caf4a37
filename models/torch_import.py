"""`importing_torch`: imports torch in two thirds of the time, in the processes that compute steps.

Torch's import registers kernels for tensors without storage, on the device `meta`, which are written in Python. Only
compilers and transformers' loading need them: `load_meta_kernels` imports them there. Imports no torch by itself.
"""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_META_KERNELS = "torch._meta_registrations"


class _Absent(ModuleType):
    """Stands for the module of the kernels, and imports it at the first use of anything in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks all modules for such names.
        load_meta_kernels()
        return getattr(sys.modules[_META_KERNELS], name)


@contextlib.contextmanager
def importing_torch() -> Iterator[None]:
    """Import torch in this context, without the kernels for `meta`, and without collections of garbage.

    Collections would visit what the import creates again and again, a fifth of its time.
    """
    if "torch" not in sys.modules:
        sys.modules[_META_KERNELS] = _Absent(_META_KERNELS)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def load_meta_kernels() -> None:
    """Import the kernels for `meta` if `importing_torch` has left them out."""
    if isinstance(sys.modules.get(_META_KERNELS), _Absent):
        del sys.modules[_META_KERNELS]
        importlib.import_module(_META_KERNELS)
