"""One uniform number per row from a counter-based generator: a function of (key, position) and nothing else.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
entered at any index: its state is the key plus a multiple of the golden ratio, its output the mixed state. Keys are
mixed as well, so that neighbouring seeds give unrelated streams. The kernels of `models.ops.triton.sampling` compute
the same.
"""

import numpy as np
import numpy.typing as npt

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_UINT64_MASK = (1 << 64) - 1


def request_key(seed: int) -> int:
    """Key of a request that brought its own seed."""
    return _mix_int(seed)


def server_key(server_seed: int, request_id: int) -> int:
    """Key of a request without a seed: reproducible from the server's seed and the request's id."""
    return _mix_int(_mix_int(~server_seed) + request_id)


def acceptance_keys(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Keys of the random numbers that accept drafts; another stream than that of sampled tokens. # [num_rows]"""
    return _mix(keys ^ _GOLDEN_GAMMA)


def uniform(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A double in [0, 1), with 53 random bits, for each (key, position). # all [num_rows]"""
    mixed = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value & _UINT64_MASK], dtype=np.uint64))[0])


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's bijective finaliser: each input bit flips each output bit with probability near a half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
