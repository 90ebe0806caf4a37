"""Gumbel noise from a counter-based generator, as a function of only seed, position and token id.

A token is sampled as the argmax of `logit / temperature + noise` (Gumbel, 1954; Maddison, Tarlow and Minka,
"A* Sampling", 2014), with independent Gumbel noise for each token id. A rounding error of the logits therefore changes
the token only if the best two candidates differ by no more than the error.

    key, position  --SplitMix64-->  row key: two words of 32 bits
    row key, id    --two hashes-->  64 random bits: a high word, and a low word made of it
    64 bits        -------------->  v in (0, 1), and the noise -log(-log(1 - v))

The row key is the output of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014) at the index `position`. The high word is computed by `triple32`, the low word by `lowbias32` (Wellons,
"Prospecting for Hash Functions", 2018), which are bijections of 32 bits, combined with the row key. The bits are equal
in NumPy, torch, C (`models/ops/cpu/noise.h`) and Triton (`models.ops.triton.sampling`). The transform is computed in
float64; Triton computes it in float32, with errors up to 3e-6.
"""

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_UINT64_MASK = (1 << 64) - 1
_WORD = 0xFFFFFFFF

SAMPLE, DRAFT, ACCEPT = range(3)
"""Streams of a key: noise of sampled tokens, noise of independently sampled drafts, and acceptance of drafts."""


def request_key(seed: int) -> int:
    """Return the key of a request with a seed."""
    return _mix_int(seed)


def server_key(server_seed: int, request_id: int) -> int:
    """Return the key of a request without a seed, which is reproducible from the server's seed and the request's
    id."""
    return _mix_int(_mix_int(~server_seed) + request_id)


def stream_keys(keys: npt.NDArray[np.uint64], stream: int) -> npt.NDArray[np.uint64]:
    """Return the keys of a stream; the noise of different streams is independent. # [num_rows]"""
    for _ in range(stream):
        keys = _mix(keys ^ _GOLDEN_GAMMA)
    return keys


def row_keys(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the row key of each (key, position); row key and token id determine the noise. # all [num_rows]"""
    return _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)


def uniform(row_key: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a double in [0, 1), with 53 random bits, for each row key."""
    return (row_key >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def gumbel_noise(row_key: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Compute the noise of token ids in float64. # int64, int64, broadcast together -> float64"""
    high, low = random_words(row_key, token_ids)
    fraction = (low.double() + 0.5) * 2.0**-32
    below = (high.double() + fraction) * 2.0**-32
    above = ((_WORD - high).double() + (1.0 - fraction)) * 2.0**-32
    # Using log1p near 0 and log near 1 keeps the precision at both ends of the interval.
    return -torch.where(below < 0.5, -torch.log1p(-below), -torch.log(above)).log()


def approximate_noise(row_keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Approximate the noise of all tokens of rows, from the high words only and in float32. # [R] int64 -> [R,
    vocab_size]

    The error for a high word h is at most 1 / h + 2^-24 / (1 - h / 2^32), which is below 1e-4 for all but a few tokens
    in 10000.
    """
    # Words are int32, since torch's int32 products wrap around.
    words = row_keys.view(torch.int32).view(-1, 2)
    first, second = words[:, :1], words[:, 1:]
    x = torch.arange(vocab_size, dtype=torch.int32, device=row_keys.device) + first
    shifted = torch.empty_like(x)
    for count, factor in ((17, -0x12A52B45), (11, -0x53B3E4AF), (15, 0x31848BAB), (14, 1)):
        torch.bitwise_right_shift(x, count, out=shifted)
        # The arithmetic shift copies the sign bit; the mask clears these copies.
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - count)) - 1)).mul_(factor)
        if count == 17:
            x.bitwise_xor_(second)
    torch.bitwise_right_shift(x, 1, out=shifted)
    # Memory that was used before is reused: page faults of new memory would take longer than the arithmetic.
    below = x.view(torch.float32).copy_(shifted.bitwise_and_(0x7FFFFFFF)).add_(0.5).mul_(2.0**-31)
    noise: torch.Tensor = below.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()
    return noise


def random_words(row_key: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low word of token ids. # int64, int64, broadcast together -> 2 x int64, each in [0, 2^32)"""
    first, second = row_key & _WORD, (row_key >> 32) & _WORD
    x = (token_ids + first) & _WORD
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & _WORD
    x ^= second
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) & _WORD
    x = ((x ^ (x >> 15)) * 0x31848BAB) & _WORD
    high = x ^ (x >> 14)
    x = high ^ first
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return high, x ^ (x >> 16)


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value & _UINT64_MASK], dtype=np.uint64))[0])


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's bijective finaliser: each input bit flips each output bit with probability near a half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
