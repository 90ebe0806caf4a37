"""The environment variables and working directory of child processes that run this checkout's code. Imports no
torch."""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])


def code_environment() -> dict[str, str]:
    """This process' environment, with this checkout on the import path whatever the child's working directory is.

    OpenMP threads of the child sleep while they wait, unless the environment says otherwise: threads that spin take
    the cores from the API process and from each other, and with one more busy process on two cores a decode step took
    up to a hundred times longer. OpenMP reads this when torch is imported.
    """
    path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
    # Kernels of the hub are code that is downloaded and run when a checkpoint's configuration names them.
    forced = {"PYTHONPATH": path, "USE_HUB_KERNELS": "0"}
    return {"OMP_WAIT_POLICY": "passive", **os.environ, **forced}


def working_directory() -> str | None:
    """The directory to start a child process in: None means this process' own, and "/" that this one was deleted.

    A release that replaces its predecessor's directory deletes it under a running server, whose next engine core could
    not load torch: oneMKL ends a process without a working directory.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None
