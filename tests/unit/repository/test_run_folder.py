"""Temporary folders of test processes: a later run removes those of processes that were killed, and no others."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAKE = "import sys; from tests.run_folder import own_folder as own; print(own('kaon-'), flush=True); sys.stdin.read()"


def process(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made its folder, and the folder."""
    made = subprocess.Popen(
        [sys.executable, "-c", MAKE],
        cwd=ROOT,
        env={"TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    return made, Path(made.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    running, kept = process(tmp_path)
    killed, left = process(tmp_path)
    killed.kill()
    killed.communicate()
    assert left.is_dir()
    ended, own = process(tmp_path)
    assert {*tmp_path.iterdir()} == {kept, own}
    for each in (ended, running):
        each.communicate()
        assert each.returncode == 0
    assert not any(tmp_path.iterdir())
