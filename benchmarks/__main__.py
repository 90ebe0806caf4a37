"""`python -m benchmarks`: runs every benchmark and writes docs/benchmarks.md. `make bench` calls it."""

import sys
from pathlib import Path

from benchmarks import engine_loop, experts, front_end, loading, quantization, startup, structured
from benchmarks.report import machine

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def main() -> None:
    sections = [f"# Benchmarks\n\nWritten by `make bench`. Single figures drift with the machine.\n\n{machine()}\n"]
    for benchmark in (startup, loading, experts, quantization, engine_loop, front_end, structured):
        sections.append(benchmark.run().markdown())
        sys.stdout.write(sections[-1] + "\n")
        sys.stdout.flush()
    PAGE.write_text("\n".join(sections))


if __name__ == "__main__":
    main()
