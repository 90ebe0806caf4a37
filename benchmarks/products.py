"""Products of the CPU operators by each form of weights, compared with this machine's limits."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.report import Table
from models.ops.cpu import dense, runtime, structures
from models.ops.cpu.packed_weight import CodedWeight, PackedWeight, QuantizedWeight
from models.ops.cpu.structures import Arguments, Step
from models.ops.weight_formats import Codes

INPUTS, OUTPUTS = 1024, 4096
FEW, MANY = (1, 2, 4, 8, 16, 32), (384, 2048)
READ_BYTES = 96 << 20
"""Bytes of each form's weights, which are read from memory by few rows. Many rows are multiplied by one weight."""
ROUNDS = 7


class _Collector:
    """A runtime that lists operators, so that one call runs them one after the other."""

    def __init__(self) -> None:
        self.arguments: list[Arguments] = []
        self.kept: list[object] = []
        self._rows: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def rows(self, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return self._rows.setdefault((num_rows, columns, dtype), torch.zeros(num_rows, columns, dtype=dtype))

    def fixed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return self.rows(1, size, dtype)[0]

    def per_token(self, num_rows: int) -> int:
        del num_rows
        return 1

    def run(self, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        del step
        self.arguments.append(arguments)
        self.kept.append(kept)

    def on(self, step: Step, most_rows: int, num_sharers: int) -> AbstractContextManager[int]:
        del most_rows, num_sharers
        return nullcontext(step.num_tokens)


class Form(NamedTuple):
    """A form of weights; `width`: inputs that share a scale."""

    name: str
    kind: str
    width: int = 0
    has_zeros: bool = False


FORMS = (
    Form("bfloat16", "bfloat16"),
    Form("`--quantization int8`", "rounded8"),
    Form("`--quantization int4`", "rounded4"),
    Form("FP8, a scale for 128 inputs", "fp8", 128),
    Form("FP8, a scale a channel", "fp8", INPUTS),
    Form("int8, a scale a channel", "int8", INPUTS),
    Form("int8, groups of 128", "int8", 128),
    Form("int4 (AWQ, GPTQ), groups of 128", "int4", 128),
    Form("the same with zero points", "int4", 128, True),
    Form("int4, groups of 32", "int4", 32),
    Form("the same with zero points", "int4", 32, True),
    Form("MXFP4", "mxfp4", 32),
)


def weight_of(form: Form) -> PackedWeight:
    """Create a weight of random codes."""
    made: PackedWeight
    if form.kind in ("bfloat16", "rounded8", "rounded4"):
        values = torch.randn(OUTPUTS, INPUTS).bfloat16()
        made = PackedWeight(OUTPUTS, INPUTS)
        if form.kind != "bfloat16":
            made = QuantizedWeight(OUTPUTS, INPUTS, 8 if form.kind == "rounded8" else 4)
        made.put(0, values)
        return made
    groups = INPUTS // form.width
    codes = torch.randint(0, 126 if form.kind == "fp8" else 16, (OUTPUTS, INPUTS), dtype=torch.uint8)
    scales, zeros = torch.rand(OUTPUTS, groups).add(0.1).half(), None
    if form.kind == "mxfp4":
        scales = torch.randint(120, 135, (OUTPUTS, groups), dtype=torch.uint8)
    elif form.kind == "fp8":
        codes, scales = codes.view(torch.float8_e4m3fn), scales.float()
    elif form.kind == "int8":
        codes = torch.randint(-128, 128, (OUTPUTS, INPUTS), dtype=torch.int8)
    if form.has_zeros:
        zeros = torch.randint(0, 16, (OUTPUTS, groups), dtype=torch.uint8)
    made = CodedWeight(OUTPUTS, INPUTS)
    made.put_codes(0, Codes(form.kind, codes, scales, zeros, form.width, lambda: torch.empty(0)))
    return made


class Measured(NamedTuple):
    """A form's bytes per weight, and the best seconds by number of rows: of READ_BYTES, or of one weight."""

    bits: float
    bytes: int
    seconds: dict[int, float]


def measure(
    forms: tuple[Form, ...], few: tuple[int, ...], many: tuple[int, ...], rounds: int
) -> tuple[dict[int, Measured], float, float]:
    """Measure in turn. Returns also the limits: bytes a second of reading, operations a second of multiplying."""
    library = runtime.load_library()
    assert library is not None
    collector = _Collector()
    direct = runtime.redirect(collector)
    calls: list[tuple[int, int, Callable[[], object]]] = []
    sizes = {}
    weights: list[torch.Tensor] = []
    for number, form in enumerate(forms):
        runtime.redirect(direct)
        weight = weight_of(form)
        runtime.redirect(collector)
        copies = -(-READ_BYTES // weight.memory.nbytes)
        sizes[number] = weight.memory.nbytes, copies
        memories = [weight.memory] + [weight.memory.clone() for _ in range(copies - 1)] if few else [weight.memory]
        for rows in (*few, *many):
            x = torch.randn(rows, INPUTS).bfloat16()
            collector.arguments = []
            for memory in memories if rows in few else memories[:1]:
                weight.memory = memory
                dense.linear(x, weight)
            operations, step = runtime.Operations(collector.arguments), Step(num_tokens=rows)
            calls.append((number, rows, partial(library.run, operations, step)))
        weights += memories
    runtime.redirect(direct)
    found = torch.zeros(library.threads, dtype=torch.int64)
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    read = runtime.Operations([structures.ReadLimit(memory.data_ptr(), memory.nbytes, found.data_ptr())])
    products = runtime.Operations([structures.ProductLimit(1 << 18, found.data_ptr())])
    one = Step(num_tokens=1)
    best: dict[tuple[int, int], float] = {}
    reading, multiplying = float("inf"), float("inf")
    for _ in range(rounds):
        for number, rows, call in calls:
            best[number, rows] = min(best.get((number, rows), float("inf")), _seconds(call))
        reading = min(reading, *(_seconds(lambda: library.run(read, one)) for _ in range(3)))
        multiplying = min(multiplying, _seconds(lambda: library.run(products, one)))
    results = {}
    for number in range(len(forms)):
        size, copies = sizes[number]
        seconds = {rows: best[number, rows] / (copies if rows in few else 1) for rows in (*few, *many)}
        results[number] = Measured(8 * size / INPUTS / OUTPUTS, size, seconds)
    del weights
    return results, memory.nbytes / reading, int(found.sum()) / multiplying


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def products_table(rounds: int = ROUNDS) -> Table:
    """The best of `rounds` runs of each number of rows by each form, in turn."""
    if not runtime.active():
        runtime.start(torch.get_num_threads())
    found, reading, multiplying = measure(FORMS, FEW, MANY, rounds)
    rows = []
    operations = 2 * INPUTS * OUTPUTS
    for number, form in enumerate(FORMS):
        one = found[number]
        limits = {n: max(one.bytes / reading, n * operations / multiplying) for n in (*FEW, *MANY)}
        shares = (f"{limits[n] / one.seconds[n]:.0%}" for n in FEW)
        speeds = (f"{found[0].seconds[n] / one.seconds[n]:.2f} x" for n in MANY)
        rows.append((form.name, f"{one.bits:.2f}", f"{one.bytes / one.seconds[1] / 1e9:.1f} GB/s", *shares, *speeds))
    loaded = runtime.load_library()
    assert loaded is not None
    return Table(
        "Products",
        f"Products of {INPUTS} inputs by {OUTPUTS} outputs by {runtime.INSTRUCTION_SETS[loaded.isa]}, the best of "
        f"{rounds} runs in turn: of few rows by {READ_BYTES >> 20} MiB of weights in memory, the share of the larger "
        f"of two limits, reading ({reading / 1e9:.1f} GB/s) and multiplying bfloat16 or float32 "
        f"({multiplying / 1e9:.0f} GFLOP/s); of many rows by one weight, the speed relative to bfloat16.",
        "one row at 75 % of reading its weights; prompts at 0.9 times bfloat16's speed.",
        ("", "bits", "one row", *(f"{n} row{'s' if n > 1 else ''}" for n in FEW), *(f"{n} rows" for n in MANY)),
        rows,
    )
