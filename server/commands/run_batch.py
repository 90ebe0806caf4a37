"""`kaon run-batch INPUT OUTPUT [MODEL] [flags]`: computes the requests in a batch file without a server.

Each answer is appended to OUTPUT as soon as it is complete. If the command is run again after an interruption, it
computes only the lines whose custom ids are not in OUTPUT.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from fastapi import FastAPI
from tqdm import tqdm

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.config.paths import why_unreadable
from engine.config.settings import load_config
from server.app import create_app
from server.batches.lines import AROUND_BODY_BYTES, MAX_LINE_BYTES, Line, read_lines, request_body
from server.batches.runner import BatchRunner
from server.errors import NotReady
from server.limits.keys import ApiKeys
from server.limits.owners import ANYONE
from server.models import Models
from server.schemas.batches import BatchEndpoint, BatchError

_POLL_SECONDS, _WATCH_SECONDS = 0.02, 1.0
"""Seconds between two checks whether the model is loaded, and whether the engine is alive."""


def run(source: str, target: str, flags: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0 if all lines were answered, 1 if any failed, 2 for bad usage."""
    try:
        config = load_config(flags)
        endpoint = _endpoint(Path(source))
        most = config.server_config.max_request_bytes
        max_bytes = MAX_LINE_BYTES if most is None else most + AROUND_BODY_BYTES
        lines, errors = read_lines(Path(source), endpoint, max_bytes=max_bytes)
        done = _answered_ids(Path(target))
    except OSError as error:
        return _complain(error, source, target, 2)
    except ValueError as error:
        sys.stderr.write(f"kaon run-batch: {error}\n")
        return 2
    if errors:
        for each in errors[:10]:
            sys.stderr.write(f"kaon run-batch: {_located(source, each)}\n")
        return 2
    pending = [line for line in lines if line.custom_id not in done]
    core = CoreManager(config)
    try:
        app = create_app(config, core, keys=ApiKeys())
        return asyncio.run(_compute(app, config.max_num_seqs, endpoint, Path(source), Path(target), pending))
    except EngineDeadError as error:
        sys.stderr.write(f"kaon run-batch: {error}\n")
        return 1
    except OSError as error:
        return _complain(error, source, target, 1)
    finally:
        core.shutdown()


def _complain(error: OSError, source: str, target: str, exit_code: int) -> int:
    """Report which file cannot be used. A write to OUTPUT, which is open, raises an error without a name."""
    path = Path(error.filename or target)
    subject = {Path(source): f"INPUT is {source}", Path(target): f"OUTPUT is {target}"}.get(path, f"a file is {path}")
    does = "written" if path == Path(target) else "read"
    sys.stderr.write(f"kaon run-batch: {subject}, which cannot be {does}: {why_unreadable(error)}\n")
    return exit_code


def _endpoint(source: Path) -> str:
    """Return the endpoint of the first line, which all lines must name. Raises `OSError`, and `ValueError` if
    invalid."""
    with source.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        url = msgspec.json.decode(first, type=_Addressed).url
    except msgspec.DecodeError as error:
        raise ValueError(f"line 1 of {source} is not a request of a batch: {error}") from error
    if url not in get_args(BatchEndpoint):
        raise ValueError(
            f"url is {url[:60]!r} in line 1 of {source}; it must be {' or '.join(get_args(BatchEndpoint))}"
        )
    return url


class _Addressed(msgspec.Struct):
    url: str


class _Answered(msgspec.Struct):
    custom_id: str
    response: msgspec.Raw


def _answered_ids(target: Path) -> set[str]:
    """Return the custom ids of the answers in an output file, and remove an incomplete last line from it.

    Raises `OSError`, and `ValueError` for a file that is no output of this command; it is not changed then.
    """
    if not target.exists():
        target.touch()  # A directory that does not exist is reported before the model loads.
    if not target.is_file() and not target.is_dir():  # A pipe or a terminal has no earlier content.
        return set()
    with target.open("rb+") as file:
        ids = set[str]()
        end = 0
        for number, line in enumerate(file, 1):
            is_cut_off = not line.endswith(b"\n")
            try:
                answered = msgspec.json.decode(line, type=_Answered)
            except msgspec.DecodeError as error:
                if is_cut_off and line.startswith(b"{") and not isinstance(error, msgspec.ValidationError):
                    break
                raise ValueError(
                    f"line {number} of {target} is not an answer of a batch; name another OUTPUT"
                ) from error
            if is_cut_off:
                break
            ids.add(answered.custom_id)
            end += len(line)
        file.truncate(end)
    return ids


def _located(source: str, error: BatchError) -> str:
    return error.message if error.line is None else f"line {error.line} of {source}: {error.message}"


async def _compute(
    app: FastAPI, max_lines: int, endpoint: str, source: Path, target: Path, pending: Sequence[Line]
) -> int:
    """Compute the lines, `max_lines` at a time. Returns the exit code. Raises `EngineDeadError`."""
    async with app.router.lifespan_context(app):
        models = Models.of(app)
        while models.why_ended is None and not _is_ready(models):
            await asyncio.sleep(_POLL_SECONDS)
        lines = asyncio.create_task(_compute_lines(app.state.batches, max_lines, endpoint, source, target, pending))
        while models.why_ended is None and not lines.done():
            await asyncio.wait([lines], timeout=_WATCH_SECONDS)
        if not lines.done():
            lines.cancel()
            await asyncio.wait([lines])
            raise EngineDeadError(models.why_ended or "")
    try:
        failed = lines.result()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    if failed:
        sys.stderr.write(f"kaon run-batch: {failed} of {len(pending)} lines failed; {target} has the reasons\n")
    return 1 if failed else 0


def _is_ready(models: Models) -> bool:
    try:
        models.check_ready()
    except NotReady:
        return False
    return True


async def _compute_lines(
    runner: BatchRunner, max_lines: int, endpoint: str, source: Path, target: Path, pending: Sequence[Line]
) -> int:
    """Compute the lines. Returns the number of lines that failed."""
    room, failed = asyncio.Semaphore(max_lines), 0
    with (
        source.open("rb") as file,
        target.open("ab") as written,
        tqdm(total=len(pending), desc="Answering", unit="line", disable=None) as progress,
    ):

        async def answer(line: Line, body: bytes) -> None:
            nonlocal failed

            async def read(seconds: float) -> bytes:
                await asyncio.sleep(seconds)
                return body

            output, succeeded = await runner.compute(endpoint, line.custom_id, read, lambda: ANYONE)
            written.write(output + b"\n")
            written.flush()
            failed += not succeeded
            progress.update()
            room.release()

        async with asyncio.TaskGroup() as running:
            for line in pending:
                await room.acquire()
                file.seek(line.start)
                running.create_task(answer(line, request_body(file.read(line.length), endpoint)))
    return failed
