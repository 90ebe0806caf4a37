"""`python -m benchmarks`: runs every benchmark of Kaon alone and writes docs/benchmarks.md. `make bench` calls it.

The page's comparison with other servers is kept, its figures of a GPU, and of the host beside one; `make bench-peers`,
`make bench-gpu` and `make bench-host` write these.
"""

import sys
from pathlib import Path

from benchmarks import decoding as experts
from benchmarks import decoding as quantization
from benchmarks import decoding as speculative
from benchmarks import front_end, host, parallel, startup
from benchmarks import parallel as data_parallel
from benchmarks import parallel as lockstep
from benchmarks import startup as loading
from benchmarks import startup as recovery
from benchmarks import step_time as engine_loop
from benchmarks import step_time as structured
from benchmarks.gpu import parts as gpu
from benchmarks.peers import page as peers
from benchmarks.report import kept_section, machine

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def main() -> None:
    sections = [f"# Benchmarks\n\nWritten by `make bench`. Single figures drift with the machine.\n\n{machine()}\n"]
    engines = (startup, recovery, loading, experts, quantization, speculative, engine_loop, parallel, lockstep)
    for benchmark in (*engines, data_parallel, front_end, structured):
        sections.append(benchmark.run().markdown())
        sys.stdout.write(sections[-1] + "\n")
        sys.stdout.flush()
    old = PAGE.read_text()
    sections += [kept_section(old, page.SECTION) for page in (host, gpu, peers)]
    PAGE.write_text("\n".join(filter(None, sections)))


if __name__ == "__main__":
    main()
