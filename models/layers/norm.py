"""Root-mean-square normalisation (Zhang and Sennrich, 2019), and layer normalisation (Ba, 2016)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from models.layers.parameter import WeightPart, empty_parameter, load_whole, require_shape
from models.ops import aiter, triton
from models.ops.aiter import operators as dense
from models.ops.cpu import dense as ops
from models.ops.cpu import runtime
from models.ops.norm import rms_norm
from models.ops.torch_ops import torch_rms_norm
from models.ops.types import NormWeight
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case


class RMSNorm(nn.Module):
    """Scales the last dimension to unit root mean square, then by a weight; computed in float32."""

    offset: ClassVar[float] = 0.0
    """What is added to the weight."""

    # Methods read `self.weight` once: `nn.Module` looks parameters up in Python.

    def __init__(self, size: int, eps: float, sums: TensorParallel = SINGLE_RANK) -> None:
        """`sums`: the ranks over which `add_norm` adds its input up first."""
        super().__init__()
        self.shape = (size,)
        self.eps, self.sums = eps, sums
        self.weight = empty_parameter(size, weight_loader=load_whole)
        self._sums: set[str] = set()
        """The sums that a pass with suspended kernels computed with the norm."""

    @property
    def operand(self) -> NormWeight:
        """The norm as operators take it."""
        return NormWeight(self.weight, self.eps, self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [..., size] -> [..., size]"""
        return rms_norm(x, self.operand)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + residual`, and that sum, the next residual. Both arguments may be overwritten.

        # [..., size] each; `x` is this rank's part of it if there are several in `sums`
        """
        if self.sums.size > 1:
            summed = self.sums.add_norm(x, residual, self.operand)
            if summed is not None:
                return summed
            x = self.sums.all_reduce(x)
        weight = self.weight
        if x.dim() == 2 and runtime.runs(x, residual, weight):
            return ops.rms_norm(x, weight, self.eps, offset=self.offset, residual=residual), residual
        if self.offset == 0.0 and aiter.runs("norm", x, residual, weight):
            return dense.add_rms_norm(x, residual, weight, self.eps)
        if x.dim() == 2 and triton.runs(x, residual, weight, operator="norm"):
            import models.ops.triton.elementwise as kernels

            how = kernels.ADD_NORM
            return kernels.rms_norm(x, weight, self.eps, offset=self.offset, residual=residual, mode=how), residual
        if triton.is_idle():
            self._sums.add("ADD_NORM")
        residual = x + residual
        return torch_rms_norm(residual, self.operand), residual

    def norm_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of `x`, plus `residual`, which may be overwritten. # [..., size] each"""
        weight = self.weight
        if x.dim() == 2 and runtime.runs(x, residual, weight):
            return ops.add_rms_norm(residual, x, weight, self.eps, offset=self.offset)
        if x.dim() == 2 and triton.runs(x, residual, weight, operator="norm"):
            import models.ops.triton.elementwise as kernels

            how = kernels.NORM_ADD
            return kernels.rms_norm(x, weight, self.eps, offset=self.offset, residual=residual, mode=how)
        if triton.is_idle():
            self._sums.add("NORM_ADD")
        return residual + torch_rms_norm(x, self.operand)

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """The norm by itself, and with the sums that a pass with suspended kernels computed."""
        from models.ops.triton import elementwise
        from models.ops.triton.cases.elementwise import NormCase

        del max_tokens
        for mode in ("PLAIN", *sorted(self._sums)):
            modes = (getattr(elementwise, mode),)
            yield NormCase(*self.shape, self.eps, self.offset, dtype, self.weight.dtype, modes)


class HeadsRMSNorm(RMSNorm):
    """An `RMSNorm` over all heads of a token together, those of other ranks included (OLMo 2, 2025)."""

    def __init__(
        self, head_dim: int, first: int, local: int, whole: int, eps: float, parallel: TensorParallel
    ) -> None:
        """`first`, `local` and `whole`: this rank's first head, its number of heads, and that of all ranks."""
        super().__init__(local * head_dim, eps)
        self.rows, self.whole, self.parallel = slice(first * head_dim, (first + local) * head_dim), whole, parallel
        self.num_features = whole * head_dim
        self.weight = empty_parameter(local * head_dim, weight_loader=self._load)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [tokens, the rank's heads * head_dim] -> the same"""
        if self.parallel.size == 1:
            return super().forward(x)
        exact = x.float()
        # Where ranks hold the same head, each head counts equally often.
        sums = torch.cat((exact.square().sum(-1, keepdim=True), exact.new_full((len(x), 1), x.shape[1])), dim=1)
        sums = self.parallel.all_reduce(sums)
        mean = sums[:, :1] / sums[:, 1:]
        return (exact * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, _part: WeightPart) -> None:
        require_shape(loaded, (self.num_features,))
        parameter.data.copy_(loaded[self.rows])


class LayerNorm(nn.Module):
    """Shifts the last dimension to mean 0, scales it to variance 1, then by a weight, and adds a bias."""

    def __init__(self, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = empty_parameter(size, weight_loader=load_whole)
        self.bias = empty_parameter(size, weight_loader=load_whole) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [..., size] -> [..., size]"""
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class OffsetRMSNorm(RMSNorm):
    """An `RMSNorm` whose checkpoint stores the weight minus one (Gemma, Qwen3-Next); applied in float32."""

    offset: ClassVar[float] = 1.0
