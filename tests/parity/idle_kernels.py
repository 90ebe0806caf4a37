"""Kernels that compute nothing, for tests of their launches' arguments and allocations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

# Rows of the table that name the interpreter are made before a test substitutes a GPU for it.
import models.ops.triton.configs  # noqa: F401
from engine.sampling_params import SamplingParams

EACH_CHOICE = (
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, top_p=0.8, min_p=0.1, top_k=9, max_tokens=3, logprobs=3),
    SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=2),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, logit_bias={5: 3.0}, max_tokens=2, logprobs=0),
)
"""Every way of sampling, each of which uses other kernels."""


_MAPPED = 2**26
"""Bytes from which malloc maps memory of its own, which the kernel fills with zeros page by page when it is used."""


def allocate_zeros(patch: pytest.MonkeyPatch) -> None:
    """The outputs of kernels are zeros. Of caches of some GiB only the pages that are used take memory."""

    def zeroed(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
            memory = allocate(*args, **kwargs)
            return memory if memory.nbytes >= _MAPPED else memory.zero_()

        return allocated

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, zeroed(getattr(owner, name)))
