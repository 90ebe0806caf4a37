"""`as_hardware_reads`: a layer's cache and scales in the FP8 that the device's hardware converts."""

import dataclasses
import functools

import torch

from models.kernels.triton.configs import target_of
from models.kernels.types import AttentionOptions, KVCacheTensor


def as_hardware_reads(
    cache: KVCacheTensor, options: AttentionOptions, device: torch.device
) -> tuple[KVCacheTensor, AttentionOptions]:
    """The same where the cache is not in FP8, or in the hardware's own.

    gfx942's (fnuz) has another bias of exponents, so its largest number is 240 instead of 448: stored is half of what
    the checkpoint's scales were made for, and scales are doubled. Raises `ValueError` where the hardware has no FP8.
    """
    if cache.k_cache.dtype is not torch.float8_e4m3fn:
        return cache, options
    target = target_of(device)
    if target.fp8 is None:
        raise ValueError(f"kv_cache_dtype is fp8, which {target.arch} does not compute; set it to auto")
    if target.fp8 == "e4m3fn":
        return cache, options
    fnuz = torch.float8_e4m3fnuz
    return KVCacheTensor(cache.k_cache.view(fnuz), cache.v_cache.view(fnuz)), _doubled(options)


@functools.lru_cache
def _doubled(options: AttentionOptions) -> AttentionOptions:
    """A layer's, the same at every step."""
    return dataclasses.replace(options, k_scale=2 * options.k_scale, v_scale=2 * options.v_scale)


def vectors_as_hardware_reads(vectors: torch.Tensor, scale: float, device: torch.device) -> tuple[torch.Tensor, float]:
    """A layer's paged vectors and their scale, as above."""
    options = AttentionOptions(scale=1.0, k_scale=scale)
    cache, options = as_hardware_reads(KVCacheTensor(vectors, vectors), options, device)
    return cache.k_cache, options.k_scale
