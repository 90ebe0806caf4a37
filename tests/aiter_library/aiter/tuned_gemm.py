"""Products by what was tuned for them."""

import torch
import torch.nn.functional as F


class TunedGemm:
    """Of matrices in 16 bits."""

    def mm(
        self,
        inp: torch.Tensor,
        weights: torch.Tensor,
        bias: torch.Tensor | None = None,
        otype: torch.dtype | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        scale_c: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return F.linear(inp, weights, bias)


tgemm = TunedGemm()
