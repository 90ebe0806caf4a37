"""Rows of the table for latent attention, its indexer and gated delta nets. Imported by their kernels' files."""

from models.kernels.triton.configs import ALL, AMPERE, CDNA, CONFIGS, INTERPRETER, KIB, RDNA, Config, Row

_INTERPRETER = (INTERPRETER.arch,)


def _config(num_warps: int, num_stages: int = 1, **blocks: int) -> Config:
    return Config(blocks, num_warps, num_stages, matrix_instr_nonkdim=16)


CONFIGS["latent_store"] = (
    Row(_INTERPRETER, _config(1, HEADS=4)),
    Row(ALL, _config(2, HEADS=16)),
)
CONFIGS["vector_store"] = (Row(ALL, _config(1)),)
# A run is long enough that what is written for it is little beside what is read, and the same whatever the batch.
CONFIGS["latent_attention"] = (
    Row(_INTERPRETER, _config(1, HEADS=16, KEYS=16, RUN=48)),
    # Tiles of float32 take twice the shared memory.
    Row(RDNA, _config(8, HEADS=16, KEYS=16, RUN=1024, DEPTH=32), {"element": (4,)}),
    Row((*CDNA, "sm_90"), _config(8, HEADS=16, KEYS=16, RUN=1024), {"element": (4,)}),
    # The queries of a tile and its sums stay in registers: more heads read latents less often, until they spill.
    Row(CDNA, _config(4, HEADS=16, KEYS=16, RUN=512), {"heads": range(17)}),
    Row(CDNA, _config(4, HEADS=32, KEYS=16, RUN=1024), {"sparse": (True,)}),
    Row(("gfx90a",), _config(4, HEADS=32, KEYS=16, RUN=1024)),
    Row(CDNA, _config(8, HEADS=64, KEYS=16, RUN=1024)),
    # Queries of RDNA would take all registers: they are read again, in parts, for each tile of latents.
    Row(("gfx1100",), _config(8, HEADS=16, KEYS=16, RUN=512, DEPTH=64)),
    Row(("gfx1201",), _config(8, HEADS=16, KEYS=32, RUN=512, DEPTH=128)),
    Row(("sm_90",), _config(4, 2, HEADS=16, KEYS=32, RUN=512), {"heads": range(17)}),
    # With more latents at a time registers run out as some releases of Triton give them out.
    Row(("sm_90",), _config(8, 2, HEADS=64, KEYS=32, RUN=1024), lds_bytes=144 * KIB),
    Row(("sm_90",), _config(8, 2, HEADS=32, KEYS=32, RUN=1024)),
)
CONFIGS["merge_latent_runs"] = (Row(ALL, _config(2)),)
CONFIGS["latent_prefill"] = (
    Row(_INTERPRETER, _config(1, QUERIES=16, KEYS=16)),
    Row((*CDNA, *RDNA, "sm_90"), _config(4, QUERIES=32, KEYS=16), {"element": (4,)}),
    Row(CDNA, _config(4, QUERIES=128, KEYS=32)),
    Row(("gfx1100",), _config(8, QUERIES=32, KEYS=16)),
    Row(("gfx1201",), _config(4, QUERIES=32, KEYS=16)),
    Row(AMPERE, _config(8, 2, QUERIES=128, KEYS=32)),
    Row(("sm_90",), _config(8, 2, QUERIES=128, KEYS=64)),
)
CONFIGS["indexer_scores"] = (
    Row(_INTERPRETER, _config(1, KEYS=16)),
    Row(ALL, _config(4, KEYS=64)),
)
CONFIGS["delta_conv"] = (Row(ALL, _config(2)),)
CONFIGS["gated_delta_step"] = (
    Row(_INTERPRETER, _config(1, VALUES=16)),
    Row(ALL, _config(4, VALUES=32)),
)
# The chunk is also what the inverses are made for: one size in both kernels.
CONFIGS["gated_delta_span"] = (
    Row(_INTERPRETER, _config(1, CHUNK=16, VALUES=16)),
    Row(CDNA, _config(8, CHUNK=64, VALUES=32)),
    Row(RDNA, _config(8, CHUNK=16, VALUES=32, DEPTH=16)),
    # NVIDIA's products take an operand from registers: longer chunks spill.
    Row(("sm_90",), _config(4, CHUNK=16, VALUES=32)),
)
CONFIGS["delta_inverse"] = (
    Row(_INTERPRETER, _config(1, CHUNK=16)),
    Row(CDNA, _config(4, CHUNK=64)),
    Row(RDNA, _config(8, CHUNK=16)),
    Row(("sm_90",), _config(4, CHUNK=16)),
)
CONFIGS["gated_norm"] = (Row(ALL, _config(1)),)
