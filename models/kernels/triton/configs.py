"""What kernels are compiled for, and with which tiles: `TARGETS`, and a row of `Config` for each kernel on each.

Every number that depends on a chip is here. Nothing is tuned while serving.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

KIB = 1024
_FP8_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
WHOLE = 1 << 16
"""A depth beyond every operand's: none is multiplied in parts."""


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture as kernels see it."""

    arch: str
    warp_size: int
    lds_bytes: int
    """Shared memory that one workgroup may have; the compiler does not check it."""
    fp8: Literal["e4m3fn", "e4m3fnuz"] | None
    """Which FP8 the hardware converts and multiplies; any other is emulated, an order of magnitude longer."""
    matrix: tuple[str, ...]
    """How its matrix instructions begin in assembly."""
    first_class: bool = False
    """Whether narrow loads are errors there, as missing matrix instructions are everywhere."""
    like: str = ""
    """Whose rows of the table it takes beside its own."""
    waves: int = 64
    """Of a multiprocessor at a time."""

    @property
    def backend(self) -> Literal["hip", "cuda"]:
        """Triton's name for who compiles for it."""
        return "cuda" if self.arch.startswith("sm_") else "hip"

    @property
    def fp8_pointer(self) -> str:
        """Triton's name for a pointer to its FP8."""
        return "*fp8e4b8" if self.fp8 == "e4m3fnuz" else "*fp8e4nv"

    @property
    def fp8_dtype(self) -> torch.dtype | None:
        """torch's name for its FP8."""
        return None if self.fp8 is None else _FP8_DTYPES[self.fp8]

    @property
    def has_float32_matrices(self) -> bool:
        """Whether its matrix units multiply float32 as it is; elsewhere it is multiplied without them."""
        return self.matrix == ("v_mfma_",)

    @property
    def fp8_max(self) -> float:
        """The largest finite number of its FP8."""
        return 240.0 if self.fp8 == "e4m3fnuz" else 448.0


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.arch: target
        for target in (
            Target("gfx90a", 64, 64 * KIB, None, ("v_mfma_",)),
            Target("gfx942", 64, 64 * KIB, "e4m3fnuz", ("v_mfma_",), first_class=True),
            Target("gfx950", 64, 160 * KIB, "e4m3fn", ("v_mfma_",), first_class=True),
            Target("gfx1100", 32, 64 * KIB, None, ("v_wmma_",)),
            Target("gfx1201", 32, 64 * KIB, "e4m3fn", ("v_wmma_",)),
            Target("sm_90", 32, 227 * KIB, "e4m3fn", ("wgmma.mma_async", "mma.sync"), first_class=True),
            Target("sm_80", 32, 163 * KIB, None, ("mma.sync",), like="sm_90"),
            Target("sm_86", 32, 99 * KIB, None, ("mma.sync",), like="sm_90", waves=48),
            Target("sm_89", 32, 99 * KIB, "e4m3fn", ("mma.sync",), like="sm_90", waves=48),
        )
    }
)
INTERPRETER = Target("interpreter", 1, 0, "e4m3fn", ())
"""What kernels run on in Triton's interpreter: small tiles, so that small problems have several."""

CDNA = ("gfx90a", "gfx942", "gfx950")
RDNA = ("gfx1100", "gfx1201")
AMPERE = ("sm_80", "sm_86", "sm_89")
"""And Ada: like Hopper, whose matrix units read shared memory, but theirs read registers."""


@dataclass(frozen=True, slots=True)
class Config:
    """How one kernel is launched on one target."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    """Its tile sizes, by the names of its constexpr arguments."""
    num_warps: int = 4
    num_stages: int = 1
    """Iterations of its inner loop whose loads are in flight; costs LDS."""
    matrix_instr_nonkdim: int | None = None
    """Rows and columns of a matrix instruction on CDNA; None lets the compiler choose."""

    def options(self, target: Target) -> dict[str, int]:
        """What a launch, or a compilation, takes besides arguments."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.matrix_instr_nonkdim is not None and target.arch in CDNA:
            options["matrix_instr_nonkdim"] = self.matrix_instr_nonkdim
        return options


def target_of(device: torch.device) -> Target:
    """The row that kernels on `device` are configured by: its own, or that of the nearest architecture.

    Raises `ValueError` for a GPU that is like none of them.
    """
    return INTERPRETER if device.type == "cpu" else _target_of_gpu(device.index)


@functools.cache
def _target_of_gpu(index: int | None) -> Target:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip is None:
        return nearest_target(f"sm_{properties.major}{properties.minor}")
    return nearest_target(properties.gcnArchName.split(":")[0])


_NEAREST_NVIDIA = ((120, "sm_89"), (90, "sm_90"), (88, "sm_86"), (80, "sm_80"))
"""From which compute capability on a GPU is nearest to which: workstations' have less shared memory than servers'."""


def nearest_target(arch: str) -> Target:
    """`arch`'s own row or that of the nearest. Raises `ValueError` where none is near."""
    if arch in TARGETS:
        return TARGETS[arch]
    for prefix, nearest in (("gfx94", "gfx942"), ("gfx11", "gfx1100"), ("gfx12", "gfx1201")):
        if arch.startswith(prefix):
            return TARGETS[nearest]
    if arch.startswith("sm_"):
        for capability, nearest in _NEAREST_NVIDIA:
            if int(arch.removeprefix("sm_")) >= capability:
                return TARGETS[nearest]
    known = ", ".join(TARGETS)
    raise ValueError(f"the GPU is {arch}, for which there are no kernel configurations; there are for {known}")


@functools.lru_cache(maxsize=4096)
def config_of(kernel: str, target: Target, **shape: object) -> Config:
    """How `kernel` is launched on `target` for a problem of this shape: the first row that is for both.

    Raises `KeyError` where there is no such row.
    """
    for row in CONFIGS[kernel]:
        if not {target.arch, target.like} & set(row.archs) or row.lds_bytes > target.lds_bytes:
            continue
        if all(shape[name] in values for name, values in row.shape.items()):
            return row.config
    raise KeyError(f"{kernel} has no configuration on {target.arch} for {shape}")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    archs: tuple[str, ...]
    config: Config
    shape: Mapping[str, range | tuple[object, ...]] = field(default_factory=dict)
    """Of the problem: only for values that are in these; those not named may be any."""
    lds_bytes: int = 0
    """Shared memory that it takes, where a target may have less: those that are `like` another."""


ALL = (*TARGETS, INTERPRETER.arch)

# One entry a kernel, and in each the more special rows before the more general.
CONFIGS: dict[str, tuple[Row, ...]] = {
    "attention_decode": (
        # float32 is multiplied without matrix units but on CDNA, of operands that are whole in registers.
        Row(RDNA, Config({"BLOCK_N": 16, "DEPTH": 32}, 8), {"element": (4,)}),
        Row(ALL, Config({"BLOCK_N": 32}), {"element": (4,)}),
        Row((INTERPRETER.arch,), Config({"BLOCK_N": 16})),
        Row(("gfx950",), Config({"BLOCK_N": 64}, 4, 1, 16), {"head_dim": range(129)}),
        Row(CDNA, Config({"BLOCK_N": 32}, 4, 1, 16)),
        Row(RDNA, Config({"BLOCK_N": 32}, 4, 1), {"head_dim": range(65)}),
        Row(RDNA, Config({"BLOCK_N": 16}, 4, 1), {"head_dim": range(129)}),
        Row(("gfx1100",), Config({"BLOCK_N": 16, "DEPTH": 64}, 4, 1)),
        Row(("gfx1201",), Config({"BLOCK_N": 16}, 8, 1)),
        Row(("sm_90",), Config({"BLOCK_N": 64}, 4, 3), {"head_dim": range(129)}),
        Row(("sm_90",), Config({"BLOCK_N": 32}, 4, 3)),
    ),
    "attention_merge": (
        Row((INTERPRETER.arch,), Config({"BLOCK_P": 2})),
        Row(ALL, Config({"BLOCK_P": 8}, 2)),
    ),
    "attention_prefill": (
        Row(RDNA, Config({"BLOCK_M": 16, "BLOCK_N": 16, "DEPTH": 32}, 8), {"element": (4,)}),
        Row(("sm_90",), Config({"BLOCK_M": 32, "BLOCK_N": 16}, 8), {"element": (4,)}),
        Row(ALL, Config({"BLOCK_M": 32, "BLOCK_N": 32}), {"element": (4,)}),
        Row((INTERPRETER.arch,), Config({"BLOCK_M": 16, "BLOCK_N": 16})),
        Row(("gfx950",), Config({"BLOCK_M": 128, "BLOCK_N": 64}, 4, 1, 16), {"head_dim": range(129)}),
        # Of keys more than these take a wave over 256 registers, and leave one wave a SIMD.
        Row(CDNA, Config({"BLOCK_M": 128, "BLOCK_N": 32}, 4, 1, 16), {"head_dim": range(129)}),
        Row(CDNA, Config({"BLOCK_M": 64, "BLOCK_N": 32}, 4, 1, 16)),
        Row(("gfx1201",), Config({"BLOCK_M": 64, "BLOCK_N": 32}, 8, 1), {"head_dim": range(129)}),
        Row(("gfx1100",), Config({"BLOCK_M": 64, "BLOCK_N": 16}, 4, 1), {"head_dim": range(129)}),
        Row(RDNA, Config({"BLOCK_M": 64, "BLOCK_N": 32, "DEPTH": 64}, 8, 1)),
        Row(("sm_90",), Config({"BLOCK_M": 128, "BLOCK_N": 64}, 8, 3), {"head_dim": range(129)}),
        Row(AMPERE, Config({"BLOCK_M": 64, "BLOCK_N": 32}, 8, 2)),
        Row(("sm_90",), Config({"BLOCK_M": 128, "BLOCK_N": 64}, 8, 2)),
    ),
    "store": (
        Row(CDNA, Config({"BLOCK_H": 8}, num_warps=2)),
        Row(("sm_90",), Config({"BLOCK_H": 8}, num_warps=2)),
        Row(ALL, Config({"BLOCK_H": 8}, num_warps=4)),
    ),
}
