"""`python -m benchmarks`: runs every benchmark of Kaon alone and writes docs/benchmarks.md. `make bench` calls it.

The page's comparison with other servers is kept; `make bench-peers` writes it.
"""

import sys
from pathlib import Path

from benchmarks import (
    data_parallel,
    engine_loop,
    experts,
    front_end,
    loading,
    parallel,
    quantization,
    recovery,
    startup,
    structured,
)
from benchmarks.peers.page import kept_section
from benchmarks.report import machine

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def main() -> None:
    sections = [f"# Benchmarks\n\nWritten by `make bench`. Single figures drift with the machine.\n\n{machine()}\n"]
    engines = (startup, recovery, loading, experts, quantization, engine_loop, parallel, data_parallel)
    for benchmark in (*engines, front_end, structured):
        sections.append(benchmark.run().markdown())
        sys.stdout.write(sections[-1] + "\n")
        sys.stdout.flush()
    sections.append(kept_section(PAGE.read_text()))
    PAGE.write_text("\n".join(filter(None, sections)))


if __name__ == "__main__":
    main()
