"""The generator of `engine.worker.counter_rng` on the device: SplitMix64 (Steele, Lea and Flood, 2014)."""

import triton
import triton.language as tl

_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser. # uint64"""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def random_bits(key, position):
    """The number of (key, position), which is in [0, 1), times 2^64. # int64 -> uint64, the lowest 11 bits are 0"""
    at = (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN_GAMMA
    return (_mix(key.to(tl.uint64, bitcast=True) + at) >> 11) << 11


@triton.jit
def acceptance_number(key, position):
    """A number in [0, 1) for whether a draft is accepted, of a stream of its own. # int64 -> float64"""
    of_stream = _mix(key.to(tl.uint64, bitcast=True) ^ _GOLDEN_GAMMA).to(tl.int64, bitcast=True)
    return (random_bits(of_stream, position) >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def share_of(bits, total):
    """`bits / 2^64` of a whole number, rounded down. # uint64, int64 -> int64"""
    return tl.umulhi(bits, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
