"""`group_by_adapter`: which of a step's tokens use which adapter. Called by the model runner, once a step."""

import numpy as np
import numpy.typing as npt
import torch

from models.forward_context import LoRATokens


def group_by_adapter(
    adapters: npt.NDArray[np.integer], query_lens: npt.NDArray[np.integer], device: torch.device
) -> tuple[LoRATokens, ...] | None:
    """A group an adapter of the step, from each row's adapter (0: none) and token count; None without any. # 2 x [B]

    Tokens that lie side by side are a slice: the layers then read and write them where they are.
    """
    by_token = np.repeat(adapters, query_lens)
    groups = []
    for adapter in np.unique(adapters[adapters > 0]).tolist():
        tokens = np.flatnonzero(by_token == adapter)
        first, last = int(tokens[0]), int(tokens[-1])
        if last - first + 1 == len(tokens):
            groups.append(LoRATokens(adapter, slice(first, last + 1)))
        else:
            groups.append(LoRATokens(adapter, torch.from_numpy(tokens).to(device)))
    return tuple(groups) or None
