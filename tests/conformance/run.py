"""`make conformance`: other people's clients and harnesses against one running server.

python -m tests.conformance.run            all suites; writes the results into docs/conformance.md
python -m tests.conformance.run openai llm these only; `-k WORD` and further pytest flags go on to pytest
python -m tests.conformance.run codex --record
                                           also write the structure of what the client sends into tests/agents
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from tests.agents.record import recording
from tests.conformance.environments import ENVIRONMENTS, HERE, InstallError, install, python_of
from tests.conformance.results import PAGE, Result, write
from tests.conformance.server import API_KEY, CHECKPOINT, MODEL, Server, StartError
from tests.conformance.suites import SUITES, Suite

_SUITE_SECONDS = 1800
RECORDS = HERE.parent / "agents"


def main(arguments: list[str]) -> int:
    """Run the named suites, or all. Returns the exit code: 0 all passed, 1 a test failed, 2 invalid arguments."""
    flags = arguments[next((i for i, each in enumerate(arguments) if each.startswith("-")), len(arguments)) :]
    names = arguments[: len(arguments) - len(flags)]
    records = "--record" in flags
    flags = [flag for flag in flags if flag != "--record"]
    known = [suite.name for suite in SUITES]
    if unknown := [name for name in names if name not in known]:
        sys.stderr.write(f"conformance: {', '.join(unknown)} is no suite; there are {', '.join(known)}\n")
        return 2
    chosen = [suite for suite in SUITES if not names or suite.name in names]
    try:
        for suite in chosen:
            _say(f"{suite.name}: environment")
            install(suite)
        results, complaints = _run_all(chosen, flags, records)
    except (InstallError, StartError) as error:
        _say(str(error))
        return 1
    failed = [f"{result.suite.name}: {name}" for result in results for name in result.failures] + complaints
    if len(chosen) == len(SUITES) and not flags and not failed:
        write(results)
        _say(f"results are in {PAGE.relative_to(PAGE.parents[1])}")
    for line in failed:
        _say(line)
    return 1 if failed else 0


def _run_all(chosen: list[Suite], flags: list[str], records: bool) -> tuple[list[Result], list[str]]:
    results, complaints = [], []
    with tempfile.TemporaryDirectory(prefix="kaon-conformance-") as scratch, Server(Path(scratch) / "log") as server:
        for suite in chosen:
            folder = Path(scratch) / suite.name
            folder.mkdir()
            if suite.script or suite.flags:
                script = folder / "script.json" if suite.script else None
                if script is not None:
                    script.write_text((HERE / suite.script).read_text().replace("$TMPDIR", str(folder)))
                flags_of_server = [str(HERE / flag) if "/" in flag else flag for flag in suite.flags]
                with Server(folder / "log", script, flags_of_server) as own:
                    result, wrong = _run(suite, own, folder, flags, records)
            else:
                result, wrong = _run(suite, server, folder, flags, records)
            results.append(result)
            complaints += wrong
            if server.process.poll() is not None:
                break
    return results, complaints


def _run(suite: Suite, server: Server, folder: Path, flags: list[str], records: bool) -> tuple[Result, list[str]]:
    """The result of a suite against `server`, and the server's internal errors."""
    started = time.monotonic()
    result = Result(suite)
    for command, junit in _commands(suite, folder, flags):
        with recording(server.url, RECORDS / f"{suite.name}.jsonl") if records else nullcontext(server.url) as url:
            environment = _environment(suite, url, folder)
            try:
                subprocess.run(command, cwd=folder, env=environment, check=False, timeout=_SUITE_SECONDS)
            except subprocess.TimeoutExpired:
                result.failures.append(f"not done within {_SUITE_SECONDS} s")
        result.read(junit)
    passed = f"{result.passed} of {result.tests} passed, {result.num_excluded} excluded"
    _say(f"{suite.name}: {passed}, {time.monotonic() - started:.0f} s")
    return result, [f"{suite.name}: {each}" for each in server.complaints()]


def _commands(suite: Suite, folder: Path, flags: list[str]) -> list[tuple[list[str], Path]]:
    """The commands of the suite, each with its JUnit file."""
    if suite.is_node:
        home = ENVIRONMENTS / suite.name
        commands = []
        for test in suite.tests:
            # Modules are looked up from the folder of the importing file.
            copy = home / Path(test).name
            shutil.copy(HERE / test, copy)
            junit = folder / f"{copy.stem}.xml"
            reporters = ["--test-reporter=spec", "--test-reporter-destination=stdout"]
            reporters += ["--test-reporter=junit", f"--test-reporter-destination={junit}"]
            commands.append((["node", "--test", *reporters, str(copy)], junit))
        return commands
    junit = folder / "junit.xml"
    pytest = [str(python_of(suite)), "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE)]
    pytest += ["--confcutdir", str(HERE), f"--junitxml={junit}", *flags]
    return [([*pytest, *(str(HERE / test) for test in suite.tests)], junit)]


def _environment(suite: Suite, url: str, folder: Path) -> dict[str, str]:
    """Environment variables of a suite's process: the server's address, and settings that disable telemetry."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "KAON_URL": url,
        "KAON_MODEL": MODEL,
        "KAON_CHECKPOINT": str(CHECKPOINT),
        "KAON_ENVIRONMENT": str(ENVIRONMENTS / suite.name),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": API_KEY,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "TMPDIR": str(folder),
        **suite.environment,
    }


def _say(line: str) -> None:
    sys.stderr.write(f"conformance: {line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
