"""Targets and tile configurations: `TARGETS`, and `CONFIGS` with a row for each kernel on each target.

Every number that depends on a chip is here, family by family: attention, dense layers with experts and sampling,
latent attention with recurrent layers, quantized products. Nothing is tuned while serving.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

KIB = 1024
_FP8_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
WHOLE = 1 << 16
"""A depth larger than any operand's, so that no operand is multiplied in parts."""


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
    """The prefix of its matrix instructions in assembly."""
    first_class: bool = False
    """Whether narrow loads are errors there, as missing matrix instructions are everywhere."""
    like: str = ""
    """The target whose rows of the table it takes in addition to its own."""
    waves: int = 64
    """Waves that a multiprocessor runs at a time."""

    @property
    def backend(self) -> Literal["hip", "cuda"]:
        """Triton's name of its backend."""
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
            Target("gfx908", 64, 64 * KIB, None, ("v_mfma_",), like="gfx90a"),
            Target("gfx90a", 64, 64 * KIB, None, ("v_mfma_",)),
            Target("gfx942", 64, 64 * KIB, "e4m3fnuz", ("v_mfma_",), first_class=True),
            Target("gfx950", 64, 160 * KIB, "e4m3fn", ("v_mfma_",), first_class=True),
            Target("gfx1100", 32, 64 * KIB, None, ("v_wmma_",)),
            Target("gfx1151", 32, 64 * KIB, None, ("v_wmma_",), like="gfx1100"),
            Target("gfx1200", 32, 64 * KIB, "e4m3fn", ("v_wmma_",), like="gfx1201"),
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
"""Those with rows of their own; gfx908 takes gfx90a's, gfx1151 (Strix Halo) gfx1100's, and gfx1200 gfx1201's."""
AMPERE = ("sm_80", "sm_86", "sm_89")
"""And Ada: like Hopper, whose matrix units read shared memory, but theirs read registers."""


EARLY_LOADS = "memory-bound-attention"
"""The order in which instructions overlap most, whatever registers it takes."""


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
    waves_per_eu: int = 0
    """On AMD, waves of a SIMD for which the compiler is to leave registers; 0 lets it choose."""
    hint: str = ""
    """On AMD, how instructions are ordered: see `EARLY_LOADS`."""

    def options(self, target: Target) -> dict[str, int | str]:
        """The options of a launch or a compilation."""
        options: dict[str, int | str] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if target.backend == "hip" and self.waves_per_eu:
            options["waves_per_eu"] = self.waves_per_eu
        if target.backend == "hip" and self.hint:
            options["schedule_hint"] = self.hint
        if self.matrix_instr_nonkdim is not None and target.has_float32_matrices:
            options["matrix_instr_nonkdim"] = self.matrix_instr_nonkdim
        return options


def target_of(device: torch.device) -> Target:
    """The row that kernels on `device` are configured by: its own, or that of the nearest architecture.

    Raises `ValueError` for a GPU that is like none of them.
    """
    if device.type == "cpu":
        return INTERPRETER if _absent is None else _absent
    return _target_of_gpu(device.index)


_absent: Target | None = None
"""The emulated GPU whose tensors a CPU's tensors stand for."""


def take_cpu_for(target: Target) -> None:
    """Compile kernels of a CPU's tensors for an emulated GPU."""
    global _absent
    _absent = target


@functools.cache
def _target_of_gpu(index: int | None) -> Target:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip is None:
        return nearest_target(f"sm_{properties.major}{properties.minor}")
    return nearest_target(properties.gcnArchName.split(":")[0])


_NEAREST_AMD = (("gfx94", "gfx942"), ("gfx115", "gfx1151"), ("gfx11", "gfx1100"), ("gfx12", "gfx1201"))
"""By the beginning of its name, to which a GPU without a row is nearest."""
_NEAREST_NVIDIA = ((120, "sm_89"), (90, "sm_90"), (88, "sm_86"), (80, "sm_80"))
"""From which compute capability on a GPU is nearest to which: workstations' have less shared memory than servers'."""


def nearest_target(arch: str) -> Target:
    """`arch`'s own row or that of the nearest. Raises `ValueError` where none is near."""
    if arch in TARGETS:
        return TARGETS[arch]
    for prefix, nearest in _NEAREST_AMD:
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
    """A row of the table."""

    archs: tuple[str, ...]
    config: Config
    shape: Mapping[str, range | tuple[object, ...]] = field(default_factory=dict)
    """Of the problem: only for values that are in these; those not named may be any."""
    lds_bytes: int = 0
    """Shared memory that it takes, where a target may have less: those that are `like` another."""


ALL = (*TARGETS, INTERPRETER.arch)
_WIDE: Mapping[str, range | tuple[object, ...]] = {"head_dim": range(257, 513)}

# One entry a kernel, and in each the more special rows before the more general.
CONFIGS: dict[str, tuple[Row, ...]] = {
    "attention_decode": (
        # float32 is multiplied without matrix units but on CDNA, of operands that are whole in registers.
        Row(RDNA, Config({"BLOCK_N": 16, "DEPTH": 32}, 8), {"element": (4,)}),
        Row(ALL, Config({"BLOCK_N": 32}), {"element": (4,)}),
        Row((INTERPRETER.arch,), Config({"BLOCK_N": 16})),
        # Heads of 512, of Gemma 4.
        Row(CDNA, Config({"BLOCK_N": 16}, 4, 1, 16), _WIDE),
        Row(RDNA, Config({"BLOCK_N": 16, "DEPTH": 64}, 8, 1), _WIDE),
        Row(("sm_90",), Config({"BLOCK_N": 16}, 8, 1), _WIDE),
        # More programs of two warps than of four are resident, and start and end while others wait for keys.
        Row(("gfx950",), Config({"BLOCK_N": 64}, 2, 1, 16, hint=EARLY_LOADS), {"head_dim": range(129), "rows": (16,)}),
        # The pieces of a short row are one tile, whose keys and values are under way at once.
        Row(CDNA, Config({"BLOCK_N": 64}, 4, 1, 16, hint=EARLY_LOADS), {"head_dim": range(129)}),
        Row(CDNA, Config({"BLOCK_N": 32}, 4, 1, 16)),
        Row(RDNA, Config({"BLOCK_N": 32}, 4, 1), {"head_dim": range(65)}),
        Row(("gfx1100",), Config({"BLOCK_N": 16}, 8, 1), {"head_dim": range(129), "rows": (64,)}),
        Row(RDNA, Config({"BLOCK_N": 16}, 4, 1), {"head_dim": range(129)}),
        Row(("gfx1100",), Config({"BLOCK_N": 16, "DEPTH": 64}, 4, 1)),
        Row(("gfx1201",), Config({"BLOCK_N": 16}, 8, 1)),
        Row(("sm_90",), Config({"BLOCK_N": 64}, 8, 3), {"head_dim": range(129), "rows": (64,)}),
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
        Row(CDNA, Config({"BLOCK_M": 32, "BLOCK_N": 16}, 4, 1, 16), _WIDE),
        Row(RDNA, Config({"BLOCK_M": 16, "BLOCK_N": 16, "DEPTH": 64}, 8, 1), _WIDE),
        Row(AMPERE, Config({"BLOCK_M": 32, "BLOCK_N": 16}, 8, 1), _WIDE),
        Row(("sm_90",), Config({"BLOCK_M": 32, "BLOCK_N": 32}, 8, 1), _WIDE),
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


# Norms, activations, mixtures of experts and sampling.


def _gemm(rows: int, columns: int, inner: int, *, warps: int, stages: int) -> Config:
    blocks = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": inner, "GROUP": 8}
    return Config(blocks, num_warps=warps, num_stages=stages, matrix_instr_nonkdim=16)


CONFIGS["rms_norm"] = (
    # A row's sum is made in the same order whatever the number of rows: tiles depend on the size alone.
    Row((INTERPRETER.arch,), Config({"ROWS": 2})),
    Row(ALL, Config({"ROWS": 16}, num_warps=4), {"size": range(257)}),
    Row(ALL, Config({"ROWS": 4}, num_warps=4), {"size": range(257, 1025)}),
    Row(ALL, Config({"ROWS": 1}, num_warps=4), {"size": range(1025, 4097)}),
    Row(ALL, Config({"ROWS": 1}, num_warps=8), {"size": range(4097, 8193)}),
    Row(ALL, Config({"ROWS": 1}, num_warps=16)),
)
CONFIGS["peer_sum"] = (
    Row((INTERPRETER.arch,), Config({"ELEMENTS": 64})),
    # Eight elements, 16 bytes, a thread.
    Row(CDNA, Config({"ELEMENTS": 2048}, num_warps=4)),
    Row(ALL, Config({"ELEMENTS": 2048}, num_warps=8)),
)
CONFIGS["peer_sum_norm"] = (
    Row(CDNA, Config(num_warps=4), {"size": range(4097)}),
    Row(CDNA, Config(num_warps=8)),
    Row(ALL, Config(num_warps=8), {"size": range(4097)}),
    Row(ALL, Config(num_warps=16)),
)
CONFIGS["gated"] = (
    # What is rounded to FP8 as well is whole groups.
    Row((INTERPRETER.arch,), Config({"FEATURES": 128}), {"rounds": (True,)}),
    Row((INTERPRETER.arch,), Config({"FEATURES": 32})),
    # Eight elements, 16 bytes, of gate and of up a thread.
    Row(CDNA, Config({"FEATURES": 2048}, num_warps=4)),
    Row(ALL, Config({"FEATURES": 1024}, num_warps=4)),
)
CONFIGS["moe_route"] = (
    Row((INTERPRETER.arch,), Config({"ROWS": 2})),
    Row(ALL, Config({"ROWS": 4}, num_warps=4), {"tile": range(257)}),
    Row(ALL, Config({"ROWS": 2}, num_warps=4)),
)
CONFIGS["moe_place"] = (
    Row((INTERPRETER.arch,), Config({"CHUNK": 16})),
    Row(ALL, Config({"CHUNK": 256}, num_warps=4)),
)
CONFIGS["moe_scan"] = (
    Row((INTERPRETER.arch,), Config({"LANES": 4, "CHUNKS": 2})),
    Row(ALL, Config({"LANES": 16, "CHUNKS": 64}, num_warps=4)),
)
_DECODE, _FEW, _MANY = {"block": (16,)}, {"block": (64,)}, {"block": (128,)}
_GATED = {"gated": (True,)}
CONFIGS["moe_gemm"] = (
    *(
        Row(
            (INTERPRETER.arch,),
            Config({"BLOCK_M": size, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP": 2}),
            {"block": (size,)},
        )
        for size in (16, 64, 128)
    ),
    # Tiles of float32 take twice the shared memory.
    *(
        Row((*CDNA, *RDNA, "sm_90"), _gemm(size, 32, 32, warps=4, stages=1), {"block": (size,), "element": (4,)})
        for size in (16, 64, 128)
    ),
    # Decodes wait for weights: small tiles of pairs, much of the inner dimension in flight.
    # Of 64 KiB of LDS, gate and up of 128 inputs would leave room for one workgroup.
    Row(("gfx90a", "gfx942"), _gemm(16, 64, 64, warps=4, stages=2), {**_DECODE, **_GATED}),
    Row(CDNA, _gemm(16, 64, 128, warps=4, stages=2), _DECODE),
    Row(("sm_90",), _gemm(16, 64, 128, warps=4, stages=4), _DECODE, 108 * KIB),
    Row(("sm_90",), _gemm(16, 64, 128, warps=4, stages=2), _DECODE),
    Row(RDNA, _gemm(16, 32, 64, warps=2, stages=1), _DECODE),
    # A gated tile has two accumulators, and so half the columns.
    Row(CDNA, _gemm(64, 64, 64, warps=4, stages=2), {**_FEW, **_GATED}),
    Row(CDNA, _gemm(64, 128, 64, warps=4, stages=2), _FEW),
    Row(CDNA, _gemm(128, 64, 64, warps=4, stages=2), {**_MANY, **_GATED}),
    Row(CDNA, _gemm(128, 128, 64, warps=4, stages=2), _MANY),
    Row(("sm_90",), _gemm(64, 64, 64, warps=4, stages=4), {**_FEW, **_GATED}),
    Row(("sm_90",), _gemm(64, 128, 64, warps=4, stages=4), _FEW),
    Row(("sm_90",), _gemm(128, 64, 64, warps=8, stages=3), {**_MANY, **_GATED}),
    Row(("sm_90",), _gemm(128, 128, 64, warps=8, stages=3), _MANY),
    Row(RDNA, _gemm(64, 32, 32, warps=4, stages=1), _FEW),
    Row(RDNA, _gemm(128, 32, 32, warps=8, stages=1), _MANY),
)
CONFIGS["moe_combine"] = (
    Row((INTERPRETER.arch,), Config({"COLUMNS": 32})),
    Row(CDNA, Config({"COLUMNS": 2048}, num_warps=4)),
    Row(ALL, Config({"COLUMNS": 1024}, num_warps=4)),
)
CONFIGS["adjust"] = (
    Row((INTERPRETER.arch,), Config({"TILE": 8})),
    Row(ALL, Config({"TILE": 256}, num_warps=4)),
)
CONFIGS["mask"] = (
    Row((INTERPRETER.arch,), Config({"WORDS": 2})),
    Row(ALL, Config({"WORDS": 128}, num_warps=4)),
)
CONFIGS["argmax_tile"] = (
    Row((INTERPRETER.arch,), Config({"TILE": 256})),
    Row(ALL, Config({"TILE": 4096}, num_warps=4)),
)
CONFIGS["argmax"] = (Row(ALL, Config(num_warps=1)),)
CONFIGS["weigh"] = (
    Row((INTERPRETER.arch,), Config({"TILE": 512})),
    # Sixteen tokens a thread, whose keys, places and addresses are all in registers.
    Row(CDNA, Config({"TILE": 4096}, num_warps=4)),
    Row(ALL, Config({"TILE": 4096}, num_warps=8)),
)
CONFIGS["draw"] = (
    Row((INTERPRETER.arch,), Config({"ROOM": 128, "TILE": 1024})),
    Row(ALL, Config({"ROOM": 1024, "TILE": 2048}, num_warps=8)),
)
CONFIGS["logprobs_tile"] = (
    Row((INTERPRETER.arch,), Config({"TILE": 128})),
    Row(CDNA, Config({"TILE": 4096}, num_warps=4)),
    Row(ALL, Config({"TILE": 4096}, num_warps=8)),
)
CONFIGS["logprobs_row"] = (Row(ALL, Config(num_warps=4)),)


class Launch(NamedTuple):
    """A kernel's tiles, and these with the compiler's options as keywords of its launch."""

    blocks: Mapping[str, int]
    keywords: Mapping[str, int | str]


@functools.cache
def launch_of(kernel: str, device: torch.device, **shape: object) -> Launch:
    """How a kernel is launched on a device, found once for each shape of the problem."""
    target = target_of(device)
    config = config_of(kernel, target, **shape)
    return Launch(config.blocks, {**config.blocks, **config.options(target)})


# Latent attention, its indexer, and recurrent layers.

_INTERPRETER = (INTERPRETER.arch,)


def _latent_config(num_warps: int, num_stages: int = 1, **blocks: int) -> Config:
    return Config(blocks, num_warps, num_stages, matrix_instr_nonkdim=16)


CONFIGS["latent_store"] = (
    Row(_INTERPRETER, _latent_config(1, HEADS=4)),
    Row(ALL, _latent_config(2, HEADS=16)),
)
CONFIGS["vector_store"] = (Row(ALL, _latent_config(1)),)
# A run is long enough that what is written for it is little next to what is read, and the same whatever the batch.
CONFIGS["latent_attention"] = (
    Row(_INTERPRETER, _latent_config(1, HEADS=16, KEYS=16, RUN=64)),
    # Tiles of float32 take twice the shared memory.
    Row(RDNA, _latent_config(8, HEADS=16, KEYS=16, RUN=1024, DEPTH=32), {"element": (4,)}),
    Row((*CDNA, "sm_90"), _latent_config(8, HEADS=16, KEYS=16, RUN=1024), {"element": (4,)}),
    # The queries of a tile and its sums stay in registers: more heads read latents less often, until they spill.
    Row(
        CDNA,
        Config({"HEADS": 16, "KEYS": 16, "RUN": 512}, 4, 1, matrix_instr_nonkdim=16, hint=EARLY_LOADS),
        {"heads": range(17)},
    ),
    Row(CDNA, _latent_config(4, HEADS=32, KEYS=16, RUN=1024), {"sparse": (True,)}),
    Row(("gfx90a",), _latent_config(4, HEADS=32, KEYS=16, RUN=1024)),
    Row(CDNA, _latent_config(8, HEADS=64, KEYS=16, RUN=1024)),
    # Queries of RDNA would take all registers: they are read again, in parts, for each tile of latents.
    Row(("gfx1100",), _latent_config(8, HEADS=16, KEYS=16, RUN=512, DEPTH=64)),
    Row(("gfx1201",), _latent_config(8, HEADS=16, KEYS=32, RUN=512, DEPTH=128), {"heads": range(17)}),
    # Several tiles of heads are programs enough, so that longer runs leave less to write.
    Row(("gfx1201",), _latent_config(8, HEADS=16, KEYS=32, RUN=2048, DEPTH=128)),
    Row(("sm_90",), _latent_config(4, 2, HEADS=16, KEYS=32, RUN=512), {"heads": range(17)}),
    # With more latents at a time registers run out as some releases of Triton give them out.
    Row(("sm_90",), _latent_config(8, 2, HEADS=64, KEYS=32, RUN=1024), lds_bytes=144 * KIB),
    Row(("sm_90",), _latent_config(8, 2, HEADS=32, KEYS=32, RUN=1024)),
)
CONFIGS["merge_latent_runs"] = (Row(ALL, _latent_config(2)),)
CONFIGS["latent_prefill"] = (
    Row(_INTERPRETER, _latent_config(1, QUERIES=16, KEYS=16)),
    Row((*CDNA, *RDNA, "sm_90"), _latent_config(4, QUERIES=32, KEYS=16), {"element": (4,)}),
    Row(CDNA, _latent_config(4, QUERIES=128, KEYS=32)),
    Row(("gfx1100",), _latent_config(8, QUERIES=32, KEYS=16)),
    Row(("gfx1201",), _latent_config(4, QUERIES=32, KEYS=16)),
    Row(AMPERE, _latent_config(8, 2, QUERIES=128, KEYS=32)),
    Row(("sm_90",), _latent_config(8, 2, QUERIES=128, KEYS=64)),
)
CONFIGS["indexer_scores"] = (
    Row(_INTERPRETER, _latent_config(1, KEYS=16)),
    Row(ALL, _latent_config(4, KEYS=64)),
)
CONFIGS["delta_conv"] = (Row(ALL, _latent_config(2)),)
CONFIGS["gated_delta_step"] = (
    Row(_INTERPRETER, _latent_config(1, VALUES=16)),
    Row(ALL, _latent_config(4, VALUES=32)),
)
# The chunk is also what the inverses are made for: one size in both kernels.
CONFIGS["gated_delta_span"] = (
    Row(_INTERPRETER, _latent_config(1, CHUNK=16, VALUES=16)),
    Row(CDNA, _latent_config(8, CHUNK=64, VALUES=32)),
    Row(RDNA, _latent_config(8, CHUNK=16, VALUES=32, DEPTH=16)),
    # NVIDIA's products take an operand from registers: longer chunks spill.
    Row(("sm_90",), _latent_config(4, CHUNK=16, VALUES=32)),
)
CONFIGS["delta_inverse"] = (
    Row(_INTERPRETER, _latent_config(1, CHUNK=16)),
    Row(CDNA, _latent_config(4, CHUNK=64)),
    Row(RDNA, _latent_config(8, CHUNK=16)),
    Row(("sm_90",), _latent_config(4, CHUNK=16)),
)
CONFIGS["gated_norm"] = (Row(ALL, _latent_config(1)),)
CONFIGS["short_conv"] = (
    Row(_INTERPRETER, _latent_config(1, COLUMNS=32)),
    Row(CDNA, _latent_config(1, COLUMNS=512)),
    Row(ALL, _latent_config(1, COLUMNS=256)),
)
CONFIGS["state_space_step"] = (
    Row(_INTERPRETER, _latent_config(1, VALUES=16)),
    Row(ALL, _latent_config(4, VALUES=32)),
)
CONFIGS["state_space_span"] = (
    Row(_INTERPRETER, _latent_config(1, CHUNK=16, VALUES=16)),
    Row(CDNA, _latent_config(8, CHUNK=64, VALUES=32), {"keys": range(129)}),
    Row(CDNA, _latent_config(8, CHUNK=32, VALUES=32, DEPTH=128)),
    Row(RDNA, _latent_config(8, CHUNK=16, VALUES=16, DEPTH=16), {"keys": range(129)}),
    Row(("gfx1100",), _latent_config(16, CHUNK=16, VALUES=16, DEPTH=16)),
    Row(("gfx1201",), _latent_config(16, CHUNK=16, VALUES=16, DEPTH=32)),
    Row(("sm_90",), _latent_config(4, CHUNK=16, VALUES=32), {"keys": range(129)}),
    Row(("sm_90",), _latent_config(8, CHUNK=16, VALUES=32)),
)
CONFIGS["delta_rule"] = (
    Row(_INTERPRETER, _latent_config(1, VALUES=16)),
    Row(ALL, _latent_config(4, VALUES=32)),
)
CONFIGS["selective_scan"] = (
    Row(_INTERPRETER, _latent_config(1, CHANNELS=32)),
    Row(ALL, _latent_config(4, CHANNELS=128)),
)
CONFIGS["group_norm"] = (
    Row(_INTERPRETER, _latent_config(1, BLOCK=32)),
    Row(CDNA, _latent_config(4, BLOCK=2048)),
    Row(ALL, _latent_config(4, BLOCK=1024)),
)


# Products with quantized weights.

FEW_ROWS = 16
"""Up to which a product waits for its weight: small tiles, so that there are as many programs as can be."""
_FEW_PRODUCT_ROWS = {"rows": range(FEW_ROWS + 1)}
_SOME = {"rows": range(65)}


def _product_config(num_warps: int, num_stages: int, rows: int, columns: int, **blocks: int) -> Config:
    return Config({"ROWS": rows, "COLUMNS": columns, **blocks}, num_warps, num_stages, matrix_instr_nonkdim=16)


# The depth of a step is the same for any number of rows: a row's sums must not depend on its batch.
CONFIGS["quantize_groups"] = (
    Row(_INTERPRETER, Config({"GROUPS": 2})),
    Row(ALL, Config({"GROUPS": 8})),
)
CONFIGS["add_splits"] = (
    Row(_INTERPRETER, Config({"COLUMNS": 64})),
    Row(ALL, Config({"COLUMNS": 1024})),
)
CONFIGS["fp8_gemm"] = (
    Row(_INTERPRETER, _product_config(1, 1, 16, 16)),
    # Without FP8 both sides take twice the registers and the shared memory.
    Row(("gfx90a",), _product_config(4, 1, 16, 32), _FEW_PRODUCT_ROWS),
    Row(("gfx90a",), _product_config(4, 1, 64, 64), _SOME),
    Row(("gfx90a",), _product_config(8, 1, 128, 64)),
    Row(CDNA, _product_config(4, 2, 16, 64), _FEW_PRODUCT_ROWS),
    Row(CDNA, _product_config(4, 2, 32, 64), _SOME),
    Row(CDNA, _product_config(8, 2, 128, 128)),
    Row(RDNA, _product_config(4, 1, 16, 32), _FEW_PRODUCT_ROWS),
    Row(RDNA, _product_config(4, 1, 64, 32)),
    Row(("sm_90",), _product_config(4, 3, 16, 32), _FEW_PRODUCT_ROWS),
    Row(AMPERE, _product_config(8, 2, 64, 64), _SOME),
    Row(AMPERE, _product_config(8, 2, 128, 64)),
    Row(("sm_90",), _product_config(4, 3, 64, 128), _SOME),
    Row(("sm_90",), _product_config(8, 3, 128, 128)),
)
CONFIGS["quantize_rows"] = (
    Row(_INTERPRETER, Config({"TILE": 64})),
    Row(ALL, Config({"TILE": 2048})),
)
CONFIGS["int8_gemm"] = (
    Row(_INTERPRETER, _product_config(1, 1, 16, 16, DEPTH=64)),
    Row(CDNA, _product_config(4, 2, 16, 32, DEPTH=128), _FEW_PRODUCT_ROWS),
    Row(CDNA, _product_config(4, 2, 64, 128, DEPTH=128), _SOME),
    Row(CDNA, _product_config(8, 2, 128, 128, DEPTH=128)),
    Row(RDNA, _product_config(4, 1, 16, 32, DEPTH=128), _FEW_PRODUCT_ROWS),
    Row(RDNA, _product_config(4, 1, 64, 32, DEPTH=128)),
    Row(("sm_90",), _product_config(4, 3, 16, 32, DEPTH=128), _FEW_PRODUCT_ROWS),
    Row(AMPERE, _product_config(8, 2, 64, 64, DEPTH=128), _SOME),
    Row(AMPERE, _product_config(8, 2, 128, 64, DEPTH=128)),
    Row(("sm_90",), _product_config(4, 3, 64, 128, DEPTH=128), _SOME),
    Row(("sm_90",), _product_config(8, 3, 128, 128, DEPTH=128)),
)
CONFIGS["four_bit_vector"] = (
    Row(_INTERPRETER, Config({"COLUMNS": 8, "LOADS": 8})),
    # LLVM fails there with the hint.
    Row(("gfx90a",), Config({"COLUMNS": 16, "LOADS": 32}, 2)),
    Row(CDNA, Config({"COLUMNS": 16, "LOADS": 32}, 2, hint=EARLY_LOADS)),
    Row(RDNA, Config({"COLUMNS": 8, "LOADS": 32}, 1)),
    # A warp has whole columns; of two warps, each would unpack the inputs of both.
    Row(("sm_90",), Config({"COLUMNS": 4, "LOADS": 64}, 1)),
)
CONFIGS["four_bit_gemm"] = (
    Row(_INTERPRETER, _product_config(1, 1, 16, 16, DEPTH=128)),
    Row(
        CDNA,
        Config({"ROWS": 16, "COLUMNS": 64, "DEPTH": 128}, 4, 2, matrix_instr_nonkdim=16, hint=EARLY_LOADS),
        _FEW_PRODUCT_ROWS,
    ),
    Row(CDNA, _product_config(8, 2, 64, 64, DEPTH=128), _SOME),
    # In the compiler's own order MXFP4 takes 131 registers, which leave two waves instead of four.
    Row(
        ("gfx942",),
        Config({"ROWS": 128, "COLUMNS": 128, "DEPTH": 128}, 8, 1, matrix_instr_nonkdim=16, hint=EARLY_LOADS),
        {"mxfp4": (True,)},
    ),
    Row(CDNA, _product_config(8, 1, 128, 128, DEPTH=128)),
    Row(RDNA, _product_config(4, 1, 16, 16, DEPTH=64), _FEW_PRODUCT_ROWS),
    Row(RDNA, _product_config(4, 1, 32, 32, DEPTH=64)),
    Row(("sm_90",), _product_config(4, 3, 16, 32, DEPTH=128), _FEW_PRODUCT_ROWS),
    Row(AMPERE, _product_config(8, 2, 64, 64, DEPTH=128), _SOME),
    Row(AMPERE, _product_config(8, 2, 128, 64, DEPTH=128)),
    Row(("sm_90",), _product_config(4, 2, 64, 64, DEPTH=128), _SOME),
    Row(("sm_90",), _product_config(8, 3, 128, 128, DEPTH=128)),
)


# As few rows' tiles of quantized weights; the depth is the same for any number of rows.
CONFIGS["dense_gemm"] = (
    Row(_INTERPRETER, _product_config(1, 1, 16, 16, DEPTH=64)),
    # Of routers that are float32 throughout.
    Row(ALL, _product_config(4, 1, 16, 32, DEPTH=32), {"element": (4,)}),
    Row(CDNA, _product_config(4, 2, 16, 64, DEPTH=128), _FEW_PRODUCT_ROWS),
    Row(CDNA, _product_config(4, 1, 64, 64, DEPTH=128), _SOME),
    Row(CDNA, _product_config(8, 1, 128, 128, DEPTH=128)),
    Row(RDNA, _product_config(4, 1, 16, 32, DEPTH=64), _FEW_PRODUCT_ROWS),
    Row(RDNA, _product_config(4, 1, 64, 32, DEPTH=64)),
    # `rows_of_tile`: no other number of rows is computed there.
    Row(("sm_90",), _product_config(4, 3, 16, 64, DEPTH=128)),
)


def _grouped(num_warps: int, num_stages: int, rows: int, columns: int, depth: int = 128) -> Config:
    blocks = {"BLOCK_M": rows, "COLUMNS": columns, "DEPTH": depth}
    return Config(blocks, num_warps, num_stages, matrix_instr_nonkdim=16)


# Blocks of pairs are those of the sort. A gated tile has two accumulators, and so half the columns.
CONFIGS["moe_four_bit_gemm"] = (
    *(Row(_INTERPRETER, _grouped(1, 1, size, 16, 64), {"block": (size,)}) for size in (16, 64, 128)),
    Row(CDNA, _grouped(2, 1, 16, 32), {"block": (16,)}),
    Row(CDNA, _grouped(4, 1, 64, 32), {"block": (64,), "gated": (True,)}),
    Row(CDNA, _grouped(4, 1, 64, 64), {"block": (64,)}),
    Row(CDNA, _grouped(8, 1, 128, 64), {"block": (128,)}),
    Row(RDNA, _grouped(4, 1, 16, 16, 64), {"block": (16,)}),
    Row(RDNA, _grouped(4, 1, 64, 16, 64), {"block": (64,)}),
    Row(RDNA, _grouped(8, 1, 128, 16, 64), {"block": (128,)}),
    Row(("sm_90",), _grouped(4, 3, 16, 32), {"block": (16,)}),
    Row(AMPERE, _grouped(8, 2, 64, 32), {"block": (64,)}),
    Row(AMPERE, _grouped(8, 2, 128, 32), {"block": (128,)}),
    Row(("sm_90",), _grouped(8, 3, 64, 64), {"block": (64,)}),
    Row(("sm_90",), _grouped(8, 3, 128, 64), {"block": (128,)}),
)


def _fp8_grouped(num_warps: int, num_stages: int, rows: int, columns: int) -> Config:
    return Config({"BLOCK_M": rows, "COLUMNS": columns}, num_warps, num_stages, matrix_instr_nonkdim=16)


# A group's depth is that of its scale. What is scaled before it is added takes registers of its own.
CONFIGS["moe_fp8_gemm"] = (
    *(Row(_INTERPRETER, _fp8_grouped(1, 1, size, 16), {"block": (size,)}) for size in (16, 64, 128)),
    Row(("gfx90a",), _fp8_grouped(4, 1, 16, 32), {"block": (16,)}),
    Row(("gfx90a",), _fp8_grouped(4, 1, 64, 32), {"block": (64,)}),
    Row(("gfx90a",), _fp8_grouped(8, 1, 128, 32), {"block": (128,)}),
    Row(CDNA, _fp8_grouped(4, 2, 16, 32), {"block": (16,)}),
    Row(CDNA, _fp8_grouped(4, 2, 64, 64), {"block": (64,)}),
    Row(CDNA, _fp8_grouped(8, 2, 128, 64), {"block": (128,)}),
    Row(("gfx1100",), _fp8_grouped(8, 1, 16, 16), {"block": (16,), **_GATED}),
    Row(("gfx1100",), _fp8_grouped(4, 1, 16, 16), {"block": (16,)}),
    Row(("gfx1201",), _fp8_grouped(4, 1, 16, 16), {"block": (16,), **_GATED}),
    Row(("gfx1100",), _fp8_grouped(4, 1, 64, 16), {"block": (64,), **_GATED}),
    Row(
        ("gfx1100",),
        Config({"BLOCK_M": 128, "COLUMNS": 16}, 8, 1, waves_per_eu=2),
        {"block": (128,), **_GATED},
    ),
    Row(RDNA, _fp8_grouped(4, 1, 16, 32), {"block": (16,)}),
    Row(RDNA, _fp8_grouped(4, 1, 64, 32), {"block": (64,)}),
    Row(RDNA, _fp8_grouped(8, 1, 128, 32), {"block": (128,)}),
    Row(("sm_90",), _fp8_grouped(4, 3, 16, 32), {"block": (16,)}),
    Row(AMPERE, _fp8_grouped(8, 2, 64, 32), {"block": (64,)}),
    Row(AMPERE, _fp8_grouped(8, 2, 128, 32), {"block": (128,)}),
    Row(("sm_90",), _fp8_grouped(4, 3, 64, 32), {"block": (64,), **_GATED}),
    Row(("sm_90",), _fp8_grouped(4, 3, 64, 64), {"block": (64,)}),
    Row(("sm_90",), _fp8_grouped(8, 3, 128, 64), {"block": (128,)}),
)
# As FP8's experts, with sums of integers in registers.
CONFIGS["moe_int8_gemm"] = (
    *(Row(_INTERPRETER, _grouped(1, 1, size, 16, 64), {"block": (size,)}) for size in (16, 64, 128)),
    Row(CDNA, _grouped(4, 2, 16, 32), {"block": (16,)}),
    Row(CDNA, _grouped(4, 2, 64, 64), {"block": (64,)}),
    Row(CDNA, _grouped(8, 2, 128, 64), {"block": (128,)}),
    Row(RDNA, _grouped(4, 1, 16, 16), {"block": (16,), **_GATED}),
    Row(RDNA, _grouped(4, 1, 16, 32), {"block": (16,)}),
    Row(RDNA, _grouped(4, 1, 64, 32), {"block": (64,)}),
    Row(RDNA, _grouped(8, 1, 128, 32), {"block": (128,)}),
    Row(("sm_90",), _grouped(4, 3, 16, 32), {"block": (16,)}),
    Row(AMPERE, _grouped(8, 2, 64, 32), {"block": (64,)}),
    Row(AMPERE, _grouped(8, 2, 128, 32), {"block": (128,)}),
    Row(("sm_90",), _grouped(4, 3, 64, 32), {"block": (64,), **_GATED}),
    Row(("sm_90",), _grouped(4, 3, 64, 64), {"block": (64,)}),
    Row(("sm_90",), _grouped(8, 3, 128, 64), {"block": (128,)}),
)
