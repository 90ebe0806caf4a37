"""The child process of `kaon quantize`: `python -m engine.commands.quantize MODEL OUT ROUNDING`.

It loads torch, so that the command's own process need not. An error is one sentence on stderr; the exit code is 0 if
the checkpoint was written, else 1.
"""

import os
import sys
from pathlib import Path
from typing import cast

import torch

from engine.config.paths import resolve_checkpoint
from models.loading.quantize import write_quantized
from models.ops.cpu import runtime
from models.quantization.config import Rounding


def main() -> int:
    """See the module."""
    model, out, rounding = sys.argv[1:]
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    try:
        if runtime.start(threads) is None:
            raise ValueError("Kaon was installed without a C compiler; install one, then Kaon again")
        write_quantized(resolve_checkpoint(model), Path(out), cast(Rounding, rounding), progress=sys.stderr.isatty())
    except (ValueError, MemoryError) as error:
        sys.stderr.write(f"kaon quantize: {error or 'memory ran out'}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
