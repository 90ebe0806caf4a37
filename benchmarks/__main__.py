"""`python -m benchmarks [NAME ...]`: runs the benchmarks of Kaon alone and writes docs/benchmarks.md; `make bench`.

A section that was not asked for is kept as it is, as are those that `make bench-peers`, `make bench-gpu` and
`make bench-host` write. Each section is written as soon as it is measured.
"""

import argparse
import sys
from collections.abc import Callable

from benchmarks import chart, decoding, front_end, hybrids, operators, parallel, products, startup, step_time
from benchmarks.report import PAGE, Table, machine, marked, put_section

BENCHMARKS: dict[str, Callable[[], Table]] = {
    "startup": startup.startup_table,
    "recovery": startup.recovery_table,
    "loading": startup.loading_table,
    "experts": decoding.experts_table,
    "products": products.products_table,
    "operators": operators.operators_table,
    "hybrids": hybrids.hybrids_table,
    "quantization": decoding.quantization_table,
    "speculation": decoding.speculation_table,
    "engine-loop": step_time.engine_loop_table,
    "ranks": parallel.ranks_table,
    "expert-parallel": parallel.expert_parallel_table,
    "placement": parallel.placement_table,
    "front-end": front_end.front_end_table,
    "structured-output": step_time.structured_output_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; all of them by default")
    parser.add_argument("--no-page", action="store_true", help="print the tables, and write no page")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"{unknown[0]!r} is not a benchmark; there are {', '.join(BENCHMARKS)}")
    for name in options.names or BENCHMARKS:
        table = BENCHMARKS[name]().markdown()
        sys.stdout.write(table + "\n")
        sys.stdout.flush()
        if not options.no_page:
            put_section(PAGE, name, marked(name, f"{table}\n{machine()}\n"))
    if not options.no_page:
        chart.draw_where_possible(PAGE)


if __name__ == "__main__":
    main()
