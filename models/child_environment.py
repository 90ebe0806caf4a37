"""The environments of child processes that run code of ours. No torch here."""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])


def own_code() -> dict[str, str]:
    """This process' own, by which the child finds the code that this one runs, whatever the directory.

    OpenMP threads of the child sleep while they wait, unless the environment says otherwise: threads that spin take
    the cores from the API process and from each other, and with one more busy process on two cores a decode step took
    up to a hundred times longer. OpenMP reads this when torch is imported.
    """
    path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path}


def own_code_without_settings() -> dict[str, str]:
    """The same without what is set for the server, for a child that works on what strangers wrote."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KAON_")}
    return {**kept, "PYTHONPATH": _ROOT}
