"""Root-mean-square normalisation (Zhang and Sennrich, 2019), and layer normalisation (Ba, 2016)."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from models.layers.lora import OutputPart
from models.layers.parameter import SourceNames, WeightPart, empty_parameter, load_whole, require_shape, rows_loader
from models.ops import aiter, triton
from models.ops.aiter import operators as dense
from models.ops.cpu import dense as ops
from models.ops.cpu import runtime
from models.ops.norm import rms_norm
from models.ops.stored_weight import Feed
from models.ops.torch_ops import torch_norm
from models.ops.types import NormWeight
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case

KEY_NORM_EPS = 1e-6
"""Epsilon of the norm of an indexer's keys, which does not follow `rms_norm_eps`."""


class RMSNorm(nn.Module):
    """Scales the last dimension to unit root mean square, then by a weight; computed in float32."""

    offset: ClassVar[float] = 0.0
    """The offset that is added to the weight."""
    is_centred: ClassVar[bool] = False
    """Whether the input is shifted to mean 0 first."""

    # Methods read `self.weight` once, since `nn.Module` looks parameters up in Python.

    def __init__(self, size: int, eps: float, sums: TensorParallel = SINGLE_RANK) -> None:
        """`sums`: the ranks over which `add_norm` first reduces its input."""
        super().__init__()
        self.shape = (size,)
        self.eps, self.sums = eps, sums
        self.weight = empty_parameter(size, weight_loader=load_whole)
        self.bias: nn.Parameter | None = None
        self.feed: Feed | None = None
        """The format of the linear layer that reads the norm first, if it takes rounded rows."""
        self._sums: set[tuple[str, float]] = set()
        """The additions fused with the norm, and their scales, that a pass with suspended kernels recorded."""

    @property
    def operand(self) -> NormWeight:
        """The weight, epsilon and kind of the norm, for the operators."""
        return NormWeight(self.weight, self.eps, self.offset, self.bias, self.is_centred)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [..., size] -> [..., size]"""
        return rms_norm(x, self.operand, self.feed)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `scale * x + residual`, and that sum as the next residual. Both arguments may be overwritten.

        Without a residual, as in a model's first layer, returns the norm of `x`, and `x`.

        # [..., size] each; with a residual and several ranks in `sums`, `x` is this rank's partial sum
        """
        if residual is None:
            return self(x), x
        weight, eps, offset, bias, is_centred = self.operand
        if self.sums.size > 1:
            # The operator that also reduces over ranks supports neither layer norms nor scales.
            is_plain = scale == 1.0 and not is_centred
            summed = self.sums.add_norm(x, residual, self.operand) if is_plain else None
            if summed is not None:
                return summed
            x = self.sums.all_reduce(x)
        if x.dim() == 2 and runtime.runs(x, residual, weight):
            normed = ops.rms_norm(
                x, weight, eps, offset=offset, bias=bias, is_centred=is_centred, residual=residual, x_scale=scale
            )
            return normed, residual
        is_plain = offset == 0.0 and scale == 1.0 and not is_centred
        if is_plain and aiter.runs("norm", x, residual, weight):
            return dense.add_rms_norm(x, residual, weight, eps)
        if x.dim() == 2 and triton.runs(x, residual, weight, operator="norm"):
            import models.ops.triton.elementwise as kernels

            rounded = None if self.feed is None else self.feed.memory(len(x), x.shape[1], x)
            normed = kernels.rms_norm(
                x,
                weight,
                eps,
                offset=offset,
                bias=bias,
                is_centred=is_centred,
                residual=residual,
                mode=kernels.ADD_NORM,
                x_scale=scale,
                rounded=rounded,
            )
            if self.feed is not None:
                self.feed.give(normed, rounded)
            return normed, residual
        if triton.is_idle():
            self._sums.add(("ADD_NORM", scale))
        residual = (x if scale == 1.0 else x * scale) + residual
        return torch_norm(residual, self.operand), residual

    def norm_add(self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """The norm of `x`, plus `residual`, which may be overwritten; the sum times `scale`. # [..., size] each"""
        weight, eps, offset, bias, is_centred = self.operand
        is_rows = x.dim() == 2 or (x.dim() == 3 and x.stride(1) == residual.stride(1) == x.shape[2])
        if is_rows and runtime.runs(x, residual, weight):
            return ops.add_rms_norm(
                residual, x, weight, eps, offset=offset, bias=bias, is_centred=is_centred, sum_scale=scale
            )
        if triton.runs(x, residual, weight, operator="norm"):
            import models.ops.triton.elementwise as kernels

            return kernels.rms_norm(
                x,
                weight,
                eps,
                offset=offset,
                bias=bias,
                is_centred=is_centred,
                residual=residual,
                mode=kernels.NORM_ADD,
                sum_scale=scale,
            )
        if triton.is_idle():
            self._sums.add(("NORM_ADD", scale))
        total = residual + torch_norm(x, self.operand)
        return total if scale == 1.0 else total * scale

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """The self-test cases of the norm alone, and of the fused additions that a pass with suspended kernels
        recorded."""
        from models.ops.triton import elementwise
        from models.ops.triton.cases.elementwise import NormCase

        del max_tokens
        for mode, scale in (("PLAIN", 1.0), *sorted(self._sums)):
            modes = (getattr(elementwise, mode),)
            yield NormCase(
                self.shape[-1],
                self.eps,
                self.offset,
                dtype,
                self.weight.dtype,
                modes,
                has_bias=self.bias is not None,
                is_centred=self.is_centred,
                scale=scale,
                rounds=mode != "NORM_ADD" and self.feed is not None and self.feed.rounds(self.weight.device),
                weight_rows=self.weight.shape[0] if self.weight.dim() == 2 else 1,
            )


def round_for_reader(layer: nn.Module, norm: RMSNorm) -> None:
    """Have a norm round its rows to FP8 for the layer that reads them first, if that layer's product supports it."""
    follow: Callable[[RMSNorm], None] | None = getattr(layer, "follow", None)
    if follow is not None:
        follow(norm)


class UnitRMSNorm(RMSNorm):
    """An `RMSNorm` without a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        del self.weight
        self.register_buffer("weight", torch.ones(size), persistent=False)


class HeadsRMSNorm(RMSNorm):
    """An `RMSNorm` over all heads of a token together, those of other ranks included (OLMo 2, 2025)."""

    def __init__(
        self, head_dim: int, first: int, local: int, whole: int, eps: float, parallel: TensorParallel
    ) -> None:
        """`first`, `local` and `whole`: this rank's first head, its number of heads, and that of all ranks."""
        super().__init__(local * head_dim, eps)
        self.parallel = parallel
        loader = rows_loader(first * head_dim, whole * head_dim)
        self.weight = empty_parameter(local * head_dim, weight_loader=loader)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [tokens, the rank's heads * head_dim] -> the same"""
        if self.parallel.size == 1:
            return super().forward(x)
        exact = x.float()
        # If several ranks hold the same head, every head is held by equally many ranks, so the mean is right.
        sums = torch.cat((exact.square().sum(-1, keepdim=True), exact.new_full((len(x), 1), x.shape[1])), dim=1)
        sums = self.parallel.all_reduce(sums)
        mean = sums[:, :1] / sums[:, 1:]
        return (exact * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight


class LayerNorm(RMSNorm):
    """Shifts the last dimension to mean 0, scales it to variance 1, then by a weight, and adds a bias."""

    is_centred: ClassVar[bool] = True

    def __init__(self, size: int, eps: float, sums: TensorParallel = SINGLE_RANK, *, bias: bool = True) -> None:
        super().__init__(size, eps, sums)
        self.bias = empty_parameter(size, weight_loader=load_whole) if bias else None


class OffsetLayerNorm(LayerNorm):
    """A `LayerNorm` whose checkpoint stores the weight minus one (Nemotron)."""

    offset: ClassVar[float] = 1.0


class HeadsLayerNorm(LayerNorm):
    """A `LayerNorm` of each head of a token, without bias, whose heads have weights of their own (Command R+)."""

    def __init__(
        self,
        part: OutputPart,
        head_dim: int,
        eps: float,
        sources: tuple[SourceNames, ...] = (),
    ) -> None:
        """`part`: that of the heads in their projection. `sources`: see `empty_parameter`; a part a head of all."""
        super().__init__(head_dim, eps, bias=False)
        (span,) = part.spans
        self.part, self.rows = part, slice(span.first, span.first + span.local)
        self.weight = empty_parameter(span.local // head_dim, head_dim, weight_loader=self._load, sources=sources)

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, part: WeightPart) -> None:
        dim = parameter.shape[1]
        if isinstance(part, int):
            require_shape(loaded, (dim,))
            head = part - self.rows.start // dim
            if 0 <= head < len(parameter):
                parameter.data[head] = self.part.in_halves(loaded.view(dim))
            return
        require_shape(loaded, (self.part.whole // dim, dim))
        parameter.data.copy_(self.part.in_halves(loaded.flatten())[self.rows].view(-1, dim))


class OffsetRMSNorm(RMSNorm):
    """An `RMSNorm` whose checkpoint stores the weight minus one (Gemma, Qwen3-Next); applied in float32."""

    offset: ClassVar[float] = 1.0
