"""The CPU's compiled operators against float32 references, for every instruction set of this processor."""

import itertools
import math
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest
import torch

from models.config.rope import RopeConfig, with_lengths
from models.layers.norm import OffsetRMSNorm, RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.ops.cpu import attention as attention_ops
from models.ops.cpu import dense as ops
from models.ops.cpu import runtime, structures
from models.ops.cpu import runtime as library
from models.ops.cpu.packed_weight import PackedWeight, QuantizedWeight, padded
from models.ops.cpu.program import record
from models.ops.cpu.sampling import GreedyHead
from models.ops.torch_ops import moved
from models.ops.types import CLAMPED_SILU, CLIPPED_SILU, GELU_TANH, SILU, AttentionOptions, HeadNorms, NormWeight
from tests.parity.clones import assert_in_clone
from tests.sweeps import sweep

LIBRARY = library.load_library()
pytestmark = pytest.mark.skipif(
    LIBRARY is None, reason="the operators were not built: install again where there is a C compiler"
)
PATHS = [
    pytest.param(isa, marks=() if isa == LIBRARY.isa else pytest.mark.slow)
    for isa in (() if LIBRARY is None else LIBRARY.available)
]
"""Sets of instructions: the best that this processor runs; the others in the long form, and by `make test-paths`."""


@pytest.fixture(params=PATHS, ids=library.INSTRUCTION_SETS.__getitem__)
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """The operators on two threads, with each instruction set that this processor supports."""
    runtime.start(2, request.param)
    yield
    runtime.stop()


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def packed(weight: torch.Tensor) -> PackedWeight:
    made = PackedWeight(*weight.shape)
    made.put(0, weight)
    return made


@pytest.mark.usefixtures("operators")
class TestLinear:
    @pytest.mark.parametrize(
        ("rows", "inputs", "outputs"),
        [(1, 64, 64), (3, 100, 70), (17, 1024, 96), (33, 48, 1000), (70, 1031, 65), (513, 544, 40), (16, 1, 1)],
    )
    def test_equals_the_reference(self, rows: int, inputs: int, outputs: int) -> None:
        x, weight, bias = bf16(rows, inputs), bf16(outputs, inputs, seed=1), bf16(outputs, seed=2)
        expected = x.double() @ weight.double().T + bias.double()
        found = ops.linear(x, packed(weight), bias, dtype=torch.float32)
        assert (found - expected).abs().max() <= 2e-6 * math.sqrt(inputs) * expected.abs().max()
        assert torch.equal(ops.linear(x, packed(weight), bias), found.bfloat16())

    def test_gives_a_row_the_same_in_any_company(self) -> None:
        # So many outputs that a task has several panels, which few rows multiply together.
        x, weight = bf16(600, 1056), packed(bf16(1130, 1056, seed=1))
        together = ops.linear(x, weight, dtype=torch.float32)
        for size in (1, 2, 3, 4, 5, 16, 31, 100):
            found = torch.cat([ops.linear(part, weight, dtype=torch.float32) for part in x.split(size)])
            assert torch.equal(found, together), size

    def test_reads_rows_of_any_stride(self) -> None:
        wide, weight = bf16(9, 200), bf16(40, 96, seed=1)
        assert torch.equal(
            ops.linear(wide[:, 64:160], packed(weight)), ops.linear(wide[:, 64:160].contiguous(), packed(weight))
        )

    def test_a_weight_may_be_packed_in_pieces(self) -> None:
        weight = bf16(150, 70)
        made = PackedWeight(150, 70)
        for first, last in itertools.pairwise((0, 7, 64, 65, 150)):
            made.put(first, weight[first:last])
        assert torch.equal(made.memory, packed(weight).memory)

    def test_a_packed_weight_gives_its_rows_back(self) -> None:
        weight = bf16(150, 71)
        ids = torch.tensor([0, 149, 31, 32, 15, 16, 77])
        assert torch.equal(ops.embed(ids, packed(weight)), weight[ids])
        assert torch.equal(ops.embed(ids, packed(weight), 7.8125), weight[ids] * 7.8125)


@pytest.mark.usefixtures("operators")
class TestElementwise:
    @pytest.mark.parametrize("size", [5, 64, 1000])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_norm_equals_the_reference(self, size: int, offset: float) -> None:
        x, weight = bf16(7, size), bf16(size, seed=1)
        expected = torch.nn.functional.rms_norm(x.float(), (size,), weight.float() + offset, 1e-5)
        torch.testing.assert_close(
            ops.rms_norm(x, weight, 1e-5, offset=offset).float(), expected, rtol=2**-7, atol=1e-6
        )

    def test_norm_adds_the_residual_first(self) -> None:
        x, residual, weight = bf16(7, 96), bf16(7, 96, seed=1), bf16(96, seed=2)
        total = x + residual
        alone = ops.rms_norm(total, weight, 1e-5)
        assert torch.equal(ops.rms_norm(x, weight, 1e-5, residual=residual), alone)
        assert torch.equal(residual, total)

    @pytest.mark.parametrize("size", [5, 96])
    def test_norm_is_added_to_the_residual(self, size: int) -> None:
        x, residual, weight = bf16(7, size), bf16(7, size, seed=1), bf16(size, seed=2)
        normed = torch.nn.functional.rms_norm(x.float(), (size,), weight.float() + 1, 1e-5)
        expected = residual.float() + normed
        found = ops.add_rms_norm(residual, x, weight, 1e-5, offset=1.0)
        assert found is residual
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-2)

    @pytest.mark.parametrize("activation", [SILU, GELU_TANH])
    def test_gate_equals_the_reference(self, activation: int) -> None:
        gate_up = bf16(5, 2 * 77, scale=4.0)
        gate_up[0, 0], gate_up[1, 0] = 300.0, -300.0
        gate, up = gate_up.float().chunk(2, dim=-1)
        function = torch.nn.functional.silu if activation == SILU else _gelu_tanh
        torch.testing.assert_close(ops.gated(gate_up, activation).float(), function(gate) * up, rtol=2**-7, atol=1e-5)

    @pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLAMPED_SILU])
    def test_a_gate_that_is_not_a_number_stays_none_and_an_infinite_one_is_open_or_shut(self, activation: int) -> None:
        gate_up = torch.ones(1, 2 * 48).bfloat16()
        gate_up[0, 0], gate_up[0, 40], gate_up[0, 47] = math.nan, math.inf, -300.0
        found = ops.gated(gate_up, activation, alpha=1.7, limit=7.0)[0]
        assert found[0].isnan()
        assert found[40] == (math.inf if activation != CLAMPED_SILU else 14)
        assert found[47].abs() < 1e-30
        assert found[1:40].isfinite().all()

    def test_rope_table_equals_the_reference(self) -> None:
        positions, frequencies = torch.tensor([0, 1, 77, 100_000]), torch.rand(12)
        cos, sin = attention_ops.rope_table(positions, frequencies, 1.5)
        angles = positions.float()[:, None] * frequencies
        torch.testing.assert_close(cos, angles.cos().repeat(1, 2) * 1.5, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin, torch.cat((-angles.sin(), angles.sin()), -1) * 1.5, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
    def test_rope_table_follows_the_lengths_that_positions_carry(
        self, rope_type: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        factors = {"short_factor": (1.0,) * 6, "long_factor": (1.5, 2.0, 3.0, 5.0, 8.0, 9.0)}
        layer = RotaryEmbedding(RopeConfig(rope_type, 1e4, 12, 64, 4.0, 1.2, **factors), 4096)
        positions = torch.tensor([0, 1, 63, 64, 700, 5, 64, 3999])
        carried = with_lengths(positions, torch.tensor([0, 0, 0, 0, 0, 65, 2000, 4000]))
        found = layer(carried)
        monkeypatch.setattr(runtime, "active", lambda: False)
        for ours, expected in zip(found, layer(carried), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)


@pytest.mark.usefixtures("operators")
class TestGatedLinear:
    """It equals, bit for bit, the gate of the product."""

    @pytest.mark.parametrize(
        ("rows", "activation"),
        [
            pytest.param(rows, activation, marks=() if (row + kind) % 3 == 0 else pytest.mark.slow)
            for row, rows in enumerate((1, 3, 33, 70, 600))
            for kind, activation in enumerate((SILU, GELU_TANH, CLAMPED_SILU, CLIPPED_SILU))
        ],
    )
    def test_equals_the_two_operators(self, rows: int, activation: int) -> None:
        for inputs, size in ((64, 32), (100, 96), (1056, 1056)):
            x, weight, bias = bf16(rows, inputs), packed(bf16(2 * size, inputs, seed=1)), bf16(2 * size, seed=2)
            for one in (bias, None):
                expected = ops.gated(ops.linear(x, weight, one), activation, alpha=1.7, limit=7.0)
                assert torch.equal(ops.gated_linear(x, weight, one, activation, alpha=1.7, limit=7.0), expected)

    def test_reads_rows_of_any_stride(self) -> None:
        wide, weight = bf16(70, 200), packed(bf16(64, 96, seed=1))
        expected = ops.gated_linear(wide[:, 64:160].contiguous(), weight, None, SILU)
        assert torch.equal(ops.gated_linear(wide[:, 64:160], weight, None, SILU), expected)

    def test_rows_of_many_inputs_which_are_cut_equal_few(self) -> None:
        x, weight, bias = bf16(150, 2600), packed(bf16(1152, 2600, seed=1)), bf16(1152, seed=2)
        for product in (ops.linear, lambda x, weight, bias: ops.gated_linear(x, weight, bias, SILU)):
            found = product(x, weight, bias)
            assert torch.equal(found, torch.cat([product(part, weight, bias) for part in x.split(30)]))

    def test_takes_no_weight_whose_halves_share_a_panel(self) -> None:
        for made in (PackedWeight, lambda *sizes: QuantizedWeight(*sizes, 8)):
            assert ops.supports_gated_linear(made(64, 128))
            assert not ops.supports_gated_linear(made(96, 128))


@pytest.mark.usefixtures("operators")
class TestRopeStore:
    @pytest.mark.parametrize(
        ("dim", "rotary_dim"), [(32, 32), (64, 24), (96, 96), (128, 128), (64, 0), (256, 80), (72, 72), (80, 20)]
    )
    @pytest.mark.parametrize("offset", [None, 0.0, 1.0])
    def test_equals_the_reference(self, dim: int, rotary_dim: int, offset: float | None) -> None:
        tokens, heads, kv_heads, block_size = 50, 10, 3, 16
        qkv = bf16(tokens, heads + 2 * kv_heads, dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        norms = None
        if offset is not None:
            norms = HeadNorms(
                *((OffsetRMSNorm if offset else RMSNorm)(dim, 1e-5).bfloat16().operand for _ in range(2))
            )
            for seed, norm in enumerate(norms):
                norm.weight.data.copy_(bf16(dim, seed=seed))
        rotation = None
        if rotary_dim:
            rotation = attention_ops.rope_table(torch.arange(7, 7 + tokens), torch.rand(rotary_dim // 2), 1.0)
        expected = []
        for x, norm in zip((q, k), norms or (None, None), strict=True):
            exact = x.float()
            if norm is not None:
                exact = torch.nn.functional.rms_norm(exact, (dim,), norm.weight.float() + offset, 1e-5)
            if rotation is not None:
                cos, sin = (each[:, None] for each in rotation)
                exact = torch.cat((_rotated(exact[..., :rotary_dim], cos, sin), exact[..., rotary_dim:]), -1)
            expected.append(exact)
        values = v.clone()
        cache = Cache(kv_heads, dim, block_size, 7 + tokens, 1)
        step, kept = cache.step([(0, 7, 7 + tokens)])
        attention_ops.rope_store(q, k, v, cache.k, cache.v, step, norms=norms, rotation=rotation)
        torch.testing.assert_close(q.float(), expected[0], rtol=2**-7, atol=1e-5)
        blocks, offsets = kept[0] // block_size, kept[0] % block_size
        torch.testing.assert_close(cache.k[blocks, :, offsets].float(), expected[1], rtol=2**-7, atol=1e-5)
        in_pairs = cache.v.view(-1, kv_heads, block_size // 2, dim, 2)
        assert torch.equal(in_pairs[blocks, :, offsets // 2, :, offsets % 2], values)

    @pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (72, 24)])
    def test_a_norm_after_the_rotation_cancels_a_factor_of_what_it_rotates(self, dim: int, rotary_dim: int) -> None:
        q, k, v = (bf16(7, heads, dim, seed=heads) for heads in (5, 2, 2))
        weights = [bf16(dim, seed=seed) for seed in range(2)]
        norms = HeadNorms(*(NormWeight(weight, 1e-5, 0.0) for weight in weights))
        rotation = attention_ops.rope_table(torch.arange(7), torch.rand(rotary_dim // 2), 1.5)
        cos, sin = (each[:, None] for each in rotation)
        expected = [
            moved(x.float(), NormWeight(weight.float(), 1e-5, 0.0), (cos, sin), is_rotated_first=True)
            for x, weight in zip((q, k), weights, strict=True)
        ]
        cache = Cache(2, dim, 16, 7, 1)
        step, kept = cache.step([(0, 0, 7)])
        attention_ops.rope_store(
            q, k, v, cache.k, cache.v, step, norms=norms, rotation=rotation, is_rotated_first=True
        )
        keys = cache.k[kept[0] // 16, :, kept[0] % 16]
        for found, exact in zip((q, keys), expected, strict=True):
            torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-5)

    def test_gives_a_token_the_same_in_any_company(self) -> None:
        """Pairs of values are written together and separately."""
        found = []
        for cuts in ((0, 90), (0, 1, 2, 5, 38, 39, 90), range(91)):
            q, k, v = (bf16(90, heads, 64, seed=heads) for heads in (4, 2, 1))
            v = v.expand(90, 2, 64).contiguous()
            cache = Cache(2, 64, 16, 90, 1)
            for first, past in itertools.pairwise(cuts):
                step, _kept = cache.step([(0, first, past)])
                attention_ops.rope_store(q[first:past], k[first:past], v[first:past], cache.k, cache.v, step)
            # The last block is read up to its last token.
            found.append((q, cache.k[cache.tables[0].long()].flatten(1)[:5], cache.v[cache.tables[0].long()]))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("wrong", [torch.ones(3, 64), bf16(3, 63), bf16(1, 3, 64), bf16(64, 3).T])
def test_a_product_refuses_what_it_would_misread(wrong: torch.Tensor) -> None:
    weight = packed(bf16(32, 64))
    with pytest.raises(ValueError, match="rows of 64 bfloat16"):
        ops.linear(wrong, weight)
    with pytest.raises(ValueError, match="rows of 64 bfloat16"):
        ops.gated_linear(wrong, weight, None, SILU)
    with pytest.raises(ValueError, match="rows of 64 bfloat16"):
        ops.grouped_linear(wrong, weight, None, torch.tensor([3]))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


class TestThreads:
    @pytest.fixture(autouse=True)
    def _stopped(self) -> Iterator[None]:
        yield
        runtime.start(1)
        runtime.stop()

    def test_programs_of_one_small_operator_are_all_run_whatever_the_number_of_threads(self) -> None:
        x, weight = bf16(9, 32), bf16(32, seed=1)
        runtime.start(1)
        expected = ops.rms_norm(x, weight, 1e-5)
        for threads in (2, 4, 1, 3, 2):
            runtime.start(threads)
            for _ in range(2000):
                assert torch.equal(ops.rms_norm(x, weight, 1e-5), expected)

    def test_a_forked_process_computes_too(self) -> None:
        """It uses only the caller's thread."""
        x, weight = bf16(9, 32), bf16(32, seed=1)
        runtime.start(2)
        expected = ops.rms_norm(x, weight, 1e-5)

        def compute() -> None:
            assert torch.equal(ops.rms_norm(x, weight, 1e-5), expected)
            runtime.start(2)
            assert torch.equal(ops.rms_norm(x, weight, 1e-5), expected)

        assert_in_clone(compute)
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), expected)

    def test_a_number_of_threads_that_cannot_be_is_the_nearest_that_can(self) -> None:
        x, weight, found = bf16(9, 32), bf16(32, seed=1), []
        for threads, nearest in ((-1, 1), (0, 1), (2000, 1024)):
            started = runtime.start(threads)
            assert started is not None
            assert started.threads == nearest
            found.append(ops.rms_norm(x, weight, 1e-5))
        runtime.start(1)
        assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.usefixtures("operators")
def test_plain_loops_read_all_memory_and_count_their_products() -> None:
    memory = torch.randint(-(2**31), 2**31, (700_032,), generator=torch.Generator().manual_seed(0)).int()
    found = torch.zeros(2, dtype=torch.int64)
    reading = structures.ReadLimit(memory.data_ptr(), memory.nbytes, found.data_ptr())
    runtime.current().run(reading, structures.Step(num_tokens=1), (memory, found))
    expected = np.bitwise_xor.reduce(memory.numpy().view(np.uint32))
    assert found[0].item() ^ found[1].item() == expected
    counts = []
    for rounds in (5, 10):
        multiplying = structures.ProductLimit(rounds, found.data_ptr())
        runtime.current().run(multiplying, structures.Step(num_tokens=1), (found,))
        counts.append(int(found.sum()))
    assert counts[1] == 2 * counts[0] > 0


def test_an_instruction_set_that_the_processor_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIBRARY is not None
    monkeypatch.setattr(LIBRARY, "available", (library.PORTABLE, library.AVX2))
    with pytest.raises(ValueError, match=r"cpu_isa is amx, .* set it to auto, or to one of portable, avx2"):
        runtime.start(1, library.AMX)


def small_pass() -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], list[weakref.ref[torch.Tensor]]]:
    """A pass, and its inputs."""
    embedding, projection, cache = packed(bf16(4, 8)), packed(bf16(96, 8)), bf16(2, 1, 16, 32)
    norms = HeadNorms(RMSNorm(32, 1e-5).bfloat16().operand, RMSNorm(32, 1e-5).bfloat16().operand)
    zero = torch.zeros(1, 1, dtype=torch.int32)
    step = attention_ops.make_step(slots=zero[0].long(), query_starts=zero[0], seq_lens=zero[0], block_tables=zero)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        del positions
        q, k, v = ops.linear(ops.embed(input_ids, embedding), projection).view(-1, 3, 32).split(1, dim=1)
        attention_ops.rope_store(q, k, v, cache, cache, step, norms=norms)
        return q

    read = [embedding.memory, projection.memory, cache, norms.q.weight, norms.k.weight]
    return forward, [weakref.ref(each) for each in read]


def test_a_recorded_pass_keeps_what_it_reads_for_as_long_as_it_may_run() -> None:
    loaded = runtime.start(1)
    assert loaded is not None
    forward, read = small_pass()
    program = record(loaded, forward, 3)
    del forward
    assert all(each() is not None for each in read)
    del program
    assert all(each() is None for each in read)


def test_where_the_operators_were_not_built_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.load_library.cache_clear()
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with caplog.at_level("INFO"):
        assert runtime.start(2) is runtime.start(2) is None
    library.load_library.cache_clear()
    assert not runtime.active()
    assert len(caplog.messages) == 1
    assert "installed without a C compiler" in caplog.messages[0]


@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is missing")
def test_clang_accepts_the_sources() -> None:
    """Only the syntax is checked; before clang 16 without the code of other instruction sets."""
    sources = map(str, sorted(Path(ops.__file__).parent.glob("*.c")))
    command = ["clang", "-std=gnu11", "-fsyntax-only", *sources]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr[-4000:]


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    """An editable installation until it is installed again."""
    other = tmp_path / "other.c"
    other.write_text("int kaon_bytes_of_arguments(int kind) { return kind + 1; }\n")
    built = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, other], check=True)
    with pytest.raises(ValueError, match=r"built from other sources than these; .* `make install` in a clone"):
        library.Library(built)


def test_a_library_whose_sources_have_changed_since_is_refused(tmp_path: Path) -> None:
    """An editable installation whose sources changed after its installation."""
    folder, name = Path(library.__file__).parent, f"_library{EXTENSION_SUFFIXES[0]}"
    for file in (*folder.glob("*.[ch]"), folder / name):
        shutil.copy(file, tmp_path)
    built = tmp_path / name
    library.Library(built)
    with (tmp_path / "kaon.h").open("a") as header:
        header.write("/* One more line. */\n")
    with pytest.raises(ValueError, match=r"have changed since they were built; .* `make install` in a clone"):
        library.Library(built)


class Cache:
    """Sequences over shuffled blocks, with their contents."""

    def __init__(
        self, kv_heads: int, dim: int, block_size: int, max_len: int, sequences: int, value_dim: int | None = None
    ) -> None:
        self.per_sequence = -(-max_len // block_size)
        blocks = torch.randperm(self.per_sequence * sequences, generator=torch.Generator().manual_seed(3))
        self.tables = blocks.view(sequences, -1).to(torch.int32)
        shape = len(blocks), kv_heads, block_size
        # The values of earlier sequences are not finite.
        self.k, self.v = (
            torch.full((*shape, each), torch.nan, dtype=torch.bfloat16) for each in (dim, value_dim or dim)
        )
        self.block_size = block_size

    def step(self, spans: list[tuple[int, int, int]]) -> tuple[structures.Step, tuple[torch.Tensor, ...]]:
        """Rows `(sequence, first, past)`. Returns the step and the arrays to which it points."""
        slots = []
        for sequence, first, past in spans:
            at = np.arange(first, past)
            blocks = self.tables[sequence].numpy()[at // self.block_size].astype(np.int64)
            slots.append(torch.from_numpy(blocks * self.block_size + at % self.block_size))
        arrays = (
            torch.cat(slots),
            torch.tensor([0, *itertools.accumulate(past - first for _, first, past in spans)], dtype=torch.int32),
            torch.tensor([past for _, _, past in spans], dtype=torch.int32),
            self.tables[[sequence for sequence, _, _ in spans]].contiguous(),
        )
        slot_mapping, query_starts, seq_lens, tables = arrays
        step = attention_ops.make_step(
            slots=slot_mapping, query_starts=query_starts, seq_lens=seq_lens, block_tables=tables
        )
        return step, arrays


LENGTHS = (70, 5, 133)


def run_steps(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    v: list[torch.Tensor],
    steps: list[list[tuple[int, int, int]]],
    options: AttentionOptions,
    block_size: int,
    sinks: torch.Tensor | None = None,
    *,
    gives_back: bool = False,
) -> list[torch.Tensor]:
    """Attention of all sequences, computed in these steps. # each [n, heads, dim]

    `gives_back`: other sequences store NaN in the blocks before a window as soon as no step attends to them.
    """
    kv_heads, dim = k[0].shape[1:]
    value_dim = v[0].shape[2]
    size, value_size = (attention_ops.stored_size(each) for each in (dim, value_dim))
    cache = Cache(kv_heads, size, block_size, max(map(len, q)), len(q), value_size)
    k_cache, v_cache = cache.k[..., :dim], cache.v[..., :value_dim]
    out = [each.new_empty(*each.shape[:2], value_dim) for each in q]
    for spans in steps:
        if gives_back:
            assert options.sliding_window is not None
            for sequence, first, _ in spans:
                unseen = max(0, first - options.sliding_window + 1) // block_size
                blocks = cache.tables[sequence, :unseen].long()
                cache.k[blocks] = cache.v[blocks] = torch.nan
        step, kept = cache.step(spans)
        rows = [torch.cat([of[s][first:past] for s, first, past in spans]) for of in (q, k, v)]
        attention_ops.rope_store(*rows, k_cache, v_cache, step)
        found = attention_ops.attention(rows[0], k_cache, v_cache, step, options, sinks)
        for (sequence, first, past), part in zip(
            spans, found.split([past - first for _, first, past in spans]), strict=True
        ):
            out[sequence][first:past] = part
        del kept
    return out


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention in float64. # [n, heads, dim]"""
    group = q.shape[1] // k.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    at = torch.arange(len(q))
    hidden = at[None, :] > at[:, None]
    if options.sliding_window is not None:
        hidden |= at[None, :] <= at[:, None] - options.sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hqk,khd->qhd", weights, values)


WHOLE = [[(0, 0, 70), (1, 0, 5), (2, 0, 133)]]
CHUNKED = [
    [(2, 0, 64), (1, 0, 2)],
    [(2, 64, 65), (1, 2, 5), (0, 0, 3)],
    [(2, 65, 100), (0, 3, 69)],
    [(0, 69, 70), (2, 100, 132)],
    [(2, 132, 133)],
]


@pytest.mark.usefixtures("operators")
class TestAttention:
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim", "block_size"),
        [
            (4, 2, 64, 16),
            (3, 3, 32, 16),
            (7, 1, 128, 32),
            (20, 1, 96, 16),
            (2, 2, 256, 48),
            (7, 1, 72, 32),
            (8, 8, 80, 16),
            (6, 2, 112, 16),
            (5, 1, 20, 16),
            (6, 2, 36, 32),
            (3, 3, 10, 16),
        ],
    )
    @pytest.mark.parametrize(
        ("window", "soft_cap", "has_sinks"),
        [(None, None, False), (20, None, True), (64, 5.0, False), (1, None, False)],
    )
    def test_equals_the_reference_in_any_steps(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        window: int | None,
        soft_cap: float | None,
        has_sinks: bool,
    ) -> None:
        q = [bf16(n, heads, dim, seed=n) for n in LENGTHS]
        k = [bf16(n, kv_heads, dim, seed=n + 1) for n in LENGTHS]
        v = [bf16(n, kv_heads, dim, seed=n + 2) for n in LENGTHS]
        options = AttentionOptions(dim**-0.5, window, soft_cap)
        sinks = torch.linspace(-2, 9, heads) if has_sinks else None
        whole = run_steps(q, k, v, WHOLE, options, block_size, sinks)
        for found, *qkv in zip(whole, q, k, v, strict=True):
            expected = reference(*qkv, options, sinks)
            assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()
        chunked = run_steps(q, k, v, CHUNKED, options, block_size, sinks)
        for found, in_chunks in zip(whole, chunked, strict=True):
            assert torch.equal(found, in_chunks)

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim", "block_size"), [(4, 2, 64, 16), (20, 1, 96, 16), (2, 2, 256, 48), (18, 2, 80, 16)]
    )
    @pytest.mark.parametrize("window", [1, 20, 64])
    def test_what_others_store_in_blocks_before_the_window_does_not_matter(
        self, heads: int, kv_heads: int, dim: int, block_size: int, window: int
    ) -> None:
        q = [bf16(n, heads, dim, seed=n) for n in LENGTHS]
        k, v = ([bf16(n, kv_heads, dim, seed=n + seed) for n in LENGTHS] for seed in (1, 2))
        options = AttentionOptions(dim**-0.5, window)
        expected = run_steps(q, k, v, CHUNKED, options, block_size)
        found = run_steps(q, k, v, CHUNKED, options, block_size, gives_back=True)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (64, 32), (32, 96), (128, 256), (36, 20)])
    @pytest.mark.parametrize("window", [None, 20])
    def test_values_have_a_size_of_their_own(self, dim: int, value_dim: int, window: int | None) -> None:
        q = [bf16(n, 6, dim, seed=n) for n in LENGTHS]
        k, v = [bf16(n, 2, dim, seed=n + 1) for n in LENGTHS], [bf16(n, 2, value_dim, seed=n + 2) for n in LENGTHS]
        options, sinks = AttentionOptions(dim**-0.5, window), torch.linspace(-2, 9, 6)
        whole = run_steps(q, k, v, WHOLE, options, 16, sinks)
        for found, *qkv in zip(whole, q, k, v, strict=True):
            expected = reference(*qkv, options, sinks)
            assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()
        for found, in_chunks in zip(whole, run_steps(q, k, v, CHUNKED, options, 16, sinks), strict=True):
            assert torch.equal(found, in_chunks)

    def test_a_long_context_equals_the_reference(self) -> None:
        """Longer than one pass of the softmax."""
        n, options = 2500, AttentionOptions(0.1)
        q, k, v = bf16(n, 2, 64), bf16(n, 1, 64, seed=1), bf16(n, 1, 64, seed=2)
        steps = [[(0, 0, 1000)], [(0, 1000, 2499)], [(0, 2499, 2500)]]
        (found,) = run_steps([q], [k], [v], steps, options, 16)
        expected = reference(q, k, v, options, None)
        assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()
        (whole,) = run_steps([q], [k], [v], [[(0, 0, n)]], options, 16)
        assert torch.equal(found, whole)

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim", "window"),
        [
            *((16, 8, 128, None), (12, 4, 72, 100), (8, 8, 80, None), (48, 16, 64, 100), (6, 2, 96, None)),
            *((12, 12, 40, 100), (6, 2, 96, 100)),
        ],
    )
    def test_decodes_of_several_sequences_equal_their_prompts(
        self, heads: int, kv_heads: int, dim: int, window: int | None
    ) -> None:
        lengths, options = (5, 16, 70, 257, 300, 1100), AttentionOptions(dim**-0.5, window)
        q = [bf16(n, heads, dim, seed=n) for n in lengths]
        k, v = ([bf16(n, kv_heads, dim, seed=n + seed) for n in lengths] for seed in (1, 2))
        before = [(row, 0, n - 1) for row, n in enumerate(lengths)]
        decodes = [(row, n - 1, n) for row, n in enumerate(lengths)]
        found = run_steps(q, k, v, [before, decodes], options, 16)
        whole = run_steps(q, k, v, [[(row, 0, n) for row, n in enumerate(lengths)]], options, 16)
        for one, other in zip(found, whole, strict=True):
            assert torch.equal(one, other)

    def test_a_query_is_attended_to_the_same_beside_queries_that_see_less(self) -> None:
        """Large scores: a rounding that depends on the batch would change the output."""
        n, options = 300, AttentionOptions(1.0, 100)
        q, k, v = bf16(n, 2, 64), bf16(n, 2, 64, seed=1), bf16(n, 2, 64, seed=2)
        (together,) = run_steps([q], [k], [v], [[(0, 0, 7)], [(0, 7, n)]], options, 16)
        (alone,) = run_steps([q], [k], [v], [[(0, i, i + 1)] for i in range(n)], options, 16)
        assert torch.equal(together, alone)


@pytest.mark.usefixtures("operators")
class TestGreedyHead:
    @sweep(2, rows=[1, 3, 33, 600], shape=[(64, 64), (71, 100), (1000, 1056), (1, 16)], has_bias=[True, False])
    def test_chooses_what_the_logits_would(self, rows: int, shape: tuple[int, int], has_bias: bool) -> None:
        x, weight = bf16(rows, shape[1]), packed(bf16(*shape, seed=1))
        bias = bf16(shape[0], seed=2) if has_bias else None
        logits = ops.linear(x, weight, bias, dtype=torch.float32)
        tokens, peaks = greedy_head(weight, bias, rows).choose(x)
        assert tokens.tolist() == logits.numpy().argmax(-1).tolist()
        assert peaks.tolist() == logits.amax(-1).tolist()

    def test_the_first_of_equal_logits_wins_and_a_nan_before_any_number(self) -> None:
        weight = torch.zeros(200, 32).bfloat16()
        weight[:, 0], weight[[40, 41, 130, 199], 0] = -1, 7
        weight[70, 1], weight[[150, 199], 1] = 3, torch.nan
        weight[:, 2] = -torch.inf
        x = torch.eye(32).bfloat16()
        for row, (token, peak) in enumerate([(40, 7.0), (150, math.nan), (0, -math.inf)]):
            alone = torch.zeros(200, 32).bfloat16()
            alone[:, row] = weight[:, row]
            tokens, peaks = greedy_head(packed(alone), None, 1).choose(x[row : row + 1])
            assert tokens.tolist() == [token]
            assert peaks.tolist() == pytest.approx([peak], nan_ok=True)

    def test_leaves_out_what_the_vocabulary_is_filled_up_with(self) -> None:
        x, weight = bf16(5, 32), packed(bf16(90, 32, seed=1))
        assert LIBRARY is not None
        head = GreedyHead.of(LIBRARY, lambda x: ops.linear(x, weight, dtype=torch.float32)[:, :70], 32, 5)
        assert head is not None
        logits = ops.linear(x, weight, dtype=torch.float32)[:, :70]
        assert head.choose(x)[0].tolist() == logits.numpy().argmax(-1).tolist()

    def test_is_that_of_models_whose_logits_are_one_product(self) -> None:
        weight = packed(bf16(64, 32))
        assert LIBRARY is not None
        scaled = GreedyHead.of(LIBRARY, lambda x: ops.linear(x, weight, dtype=torch.float32) * 2, 32, 4)
        assert scaled is None
        assert GreedyHead.of(LIBRARY, lambda x: ops.linear(x, weight), 32, 4) is None


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("shared", "group", "dim"),
    [(256, 2, 64), (300, 1, 80), (1100, 5, 64), (2064, 2, 64), (700, 16, 72), (700, 17, 64)],
)
def test_rows_that_share_their_first_blocks_attend_as_each_does_alone(shared: int, group: int, dim: int) -> None:
    kv_heads, block_size = 2, 16
    lengths = [shared + extra for extra in (400, 300, 17, 1, 5)] + [90, shared + 64]
    shape = len(lengths) * 256, kv_heads, block_size, dim
    k_cache, v_cache = (bf16(*shape, seed=seed) for seed in (1, 2))
    tables = torch.randperm(shape[0], generator=torch.Generator().manual_seed(4)).view(len(lengths), -1).int()
    tables[1:5, : shared // block_size] = tables[0, : shared // block_size]
    tables[6, : shared // block_size // 2] = tables[0, : shared // block_size // 2]
    q = bf16(len(lengths), kv_heads * group, dim, seed=3)

    def attend(rows: list[int]) -> torch.Tensor:
        step = attention_ops.make_step(
            slots=torch.zeros(len(rows), dtype=torch.int64),
            query_starts=torch.arange(len(rows) + 1, dtype=torch.int32),
            seq_lens=torch.tensor([lengths[row] for row in rows], dtype=torch.int32),
            block_tables=tables[rows].contiguous(),
        )
        return attention_ops.attention(q[rows], k_cache, v_cache, step, AttentionOptions(dim**-0.5))

    rows = list(range(len(lengths)))
    assert torch.equal(attend(rows), torch.cat([attend([row]) for row in rows]))


def greedy_head(weight: PackedWeight, bias: torch.Tensor | None, max_rows: int) -> GreedyHead:
    def compute_logits(x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, weight, bias, dtype=torch.float32)

    native = library.load_library()
    assert native is not None
    made = GreedyHead.of(native, compute_logits, weight.in_features, max_rows)
    assert made is not None
    return made


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("counts", [[0, 3, 0, 1, 40, 600], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize(("has_bias", "outputs"), [(True, 96), (False, 96), (True, 75), (False, 20)])
def test_grouped_rows_each_meet_their_own_weight(counts: list[int], has_bias: bool, outputs: int) -> None:
    x, weights, apart = bf16(sum(counts) + 2, 100), bf16(6, outputs, 100, seed=1), padded(outputs)
    bias = bf16(6, outputs, seed=2) if has_bias else None
    stack = PackedWeight(6 * apart, 100)
    for place, weight in enumerate(weights):
        stack.put(place * apart, weight)
    found = ops.grouped_linear(x, stack, bias, torch.tensor(counts), out_features=outputs)
    for place, rows in enumerate(x[:-2].split(counts)):
        own = ops.linear(rows, packed(weights[place]), None if bias is None else bias[place])
        assert torch.equal(found[sum(counts[:place]) : sum(counts[: place + 1])], own)
    assert not found[-2:].any()
