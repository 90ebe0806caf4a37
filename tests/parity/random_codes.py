"""Random weights as quantised checkpoints store them, and comparisons of their products. Imports no transformers."""

import torch

from models.ops.cpu import runtime
from models.ops.weight_formats import Codes

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
KINDS = [
    ("int4", 32, torch.float16),
    ("int4", 128, torch.bfloat16),
    ("symmetric int4", 32, torch.float16),
    ("mxfp4", 32, torch.uint8),
    ("int8", 1 << 20, torch.float32),
    ("int8", 64, torch.float16),
    ("fp8", 128, torch.float32),
    ("fp8", 1 << 20, torch.float32),
]


def random_codes(kind: str, width: int, dtype: torch.dtype, rows: int, inputs: int) -> tuple[Codes, torch.Tensor]:
    """Codes of all values, and their dequantised weight, computed in float32."""
    kind, is_symmetric = kind.removeprefix("symmetric "), kind.startswith("symmetric")
    groups = -(-inputs // width)
    scales = torch.rand(rows, groups).add(0.1).to(torch.float32 if dtype is torch.uint8 else dtype)
    zeros = None
    codes = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8)
    if kind == "mxfp4":
        exponents = torch.randint(120, 135, (rows, groups), dtype=torch.uint8)
        scales, numbers = torch.exp2(exponents.float() - 127), torch.cat((E2M1, -E2M1))[codes.long()]
    elif kind == "int4":
        zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8)
        if is_symmetric:
            zeros[:] = 8
        numbers = codes.float() - zeros.float().repeat_interleave(width, 1)[:, :inputs]
    elif kind == "int8":
        codes = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
        # With float32 scales and without zero points, as in checkpoints.
        high = 1 if dtype is torch.float32 else 128
        zeros = torch.randint(1 - high, high, (rows, groups), dtype=torch.int8)
        numbers = codes.float() - zeros.float().repeat_interleave(min(width, inputs), 1)[:, :inputs]
    else:
        if width == 128:
            scales[:] = scales[0]  # As in a block of 128 outputs.
        codes = torch.randint(0, 127, (rows, inputs), dtype=torch.uint8)
        codes = (codes | torch.randint(0, 2, (rows, inputs), dtype=torch.uint8) << 7).view(torch.float8_e4m3fn)
        numbers = codes.float()
    meant = numbers * scales.float().repeat_interleave(min(width, inputs), 1)[:, :inputs]
    stored = exponents if kind == "mxfp4" else scales
    return Codes(kind, codes, stored, zeros, width, lambda: meant.bfloat16()), meant.bfloat16()


def assert_same_products(found: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, meant: torch.Tensor) -> None:
    """Bit for bit if AMX multiplies; otherwise within the rounding of the weight, of the sums and of the result.

    A weight is rounded by up to 2**-9 of itself, so the error of a product is at most 2**-9 of the norms' product.
    """
    if is_exact():
        assert torch.equal(found, expected)
        return
    scale = x.float().norm(dim=1, keepdim=True) * meant.float().norm(dim=1).max()
    torch.testing.assert_close(found.float() / scale, expected.float() / scale, rtol=2**-7, atol=2**-9)


def is_exact() -> bool:
    """Whether codes are converted to bfloat16 before they are multiplied."""
    loaded = runtime.load_library()
    return loaded is not None and loaded.isa == runtime.AMX
