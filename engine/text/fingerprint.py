"""`weights_digest`: names the weights of a checkpoint without reading all of them."""

import hashlib
from pathlib import Path

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def weights_digest(checkpoint: Path) -> str:
    """Eight hexadecimal digits of a hash over a checkpoint's configuration and weights.

    Of each file of weights its name, its size, its first bytes, which say where each tensor is, and samples at even
    distances. A file that is changed in a few bytes between the samples keeps its digest.
    """
    digest = hashlib.sha256()
    files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.bin")]
    for path in (checkpoint / "config.json", *sorted(files)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            step = max(_SAMPLE_BYTES, size // _SAMPLES)
            for first in range(0, size, step):
                file.seek(first)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:8]
