"""`kaon key create | list | revoke`: manages the file of API keys that `--api-key-file` names."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn, get_args

from server.limits.key_file import KeyFile, KeyRecord, exclusive
from server.limits.owners import Scope

_SPAN = re.compile(r"(\d{1,5})([hdw])")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}
_QUOTAS = ("requests_per_minute", "prompt_tokens_per_minute", "output_tokens_per_minute")


class KeyCommandError(Exception):
    """The command failed; the message is a sentence. `is_usage`: whether its arguments are wrong."""

    def __init__(self, message: str, *, is_usage: bool = False) -> None:
        super().__init__(message)
        self.is_usage = is_usage


def run(arguments: Sequence[str]) -> int:
    """Run one command. Returns the exit code. Raises `KeyCommandError`."""
    options = _parser().parse_args(arguments)
    path = Path(options.file)
    try:
        with exclusive(path):
            file = KeyFile.load(path)
            if options.command == "create":
                _create(file, path, options)
            elif options.command == "revoke":
                file.revoke(options.name)
                file.save(path)
                _show(f"{options.name} is revoked; running servers refuse it within seconds\n")
            else:
                _list(file)
    except OSError as error:
        raise KeyCommandError(f"{path} cannot be used: {error.strerror}") from error
    except ValueError as error:
        raise KeyCommandError(f"{path}: {error}") from error
    return 0


def _create(file: KeyFile, path: Path, options: argparse.Namespace) -> None:
    quotas = {name: getattr(options, name) for name in _QUOTAS}
    scopes = options.scope and sorted(set(options.scope))
    key = file.create(
        options.name, scopes=scopes, group=options.group, weight=options.weight, expires=options.expires, **quotas
    )
    # Shown first, so that the file has no key that was not seen.
    _show(key + "\n")
    try:
        file.save(path)
    except OSError as error:
        raise KeyCommandError(
            f"{path} cannot be written: {error.strerror}; the key that was shown is not valid"
        ) from error
    sys.stderr.write(f"key {options.name} is in {path}; it is not shown again\n")


def _show(text: str) -> None:
    """Write to standard output, and make sure that it arrives. Raises `KeyCommandError`."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Otherwise the interpreter's last flush would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise KeyCommandError(f"standard output cannot be written: {error.strerror}") from error


def _list(file: KeyFile) -> None:
    now = datetime.now(UTC)
    rows = [("NAME", "SCOPES", "GROUP", "WEIGHT", "REQUESTS/PROMPT/OUTPUT A MINUTE", "EXPIRES", "DIGEST")]
    rows += [_row(record, now) for record in file.keys]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    _show("".join(line.rstrip() + "\n" for line in lines))


def _row(record: KeyRecord, now: datetime) -> tuple[str, str, str, str, str, str, str]:
    quotas = "/".join(str(getattr(record, name) or "-") for name in _QUOTAS)
    expires = "never"
    if record.expires is not None:
        expires = record.expires.strftime("%Y-%m-%d %H:%M") + (" (expired)" if record.expires <= now else "")
    scopes = ",".join(record.scopes)
    return record.name, scopes, record.group or "-", f"{record.weight:g}", quotas, expires, record.digest[:12]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise KeyCommandError(message, is_usage=True)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kaon key", description="Manage the file of API keys that --api-key-file names.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="create | list | revoke")
    create = commands.add_parser("create", help="make a key and show it once")
    show = commands.add_parser("list", help="show the keys without their secrets")
    revoke = commands.add_parser("revoke", help="remove a key")
    default = os.environ.get("KAON_API_KEY_FILE")
    for command in (create, show, revoke):
        command.add_argument(
            "--file", default=default, required=default is None, help="the key file (default: KAON_API_KEY_FILE)"
        )
    for command in (create, revoke):
        command.add_argument("name", metavar="NAME", help="the key's name in metrics and logs")
    create.add_argument(
        "--scope", action="append", choices=get_args(Scope), help="what it opens; may be repeated (default: inference)"
    )
    create.add_argument("--group", help="keys of one group share cached prefixes")
    create.add_argument("--weight", type=float, help="its share where keys compete (default: 1)")
    create.add_argument("--expires", type=_moment, help="a date such as 2027-01-31, or a time from now: 12h, 90d, 4w")
    for name in _QUOTAS:
        create.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help="most of these, on average")
    return parser


def _moment(text: str) -> datetime:
    if match := _SPAN.fullmatch(text):
        return (datetime.now(UTC) + timedelta(**{_UNITS[match[2]]: int(match[1])})).replace(microsecond=0)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a date such as 2027-01-31 nor a span as 90d") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    if moment <= datetime.now(UTC):
        raise argparse.ArgumentTypeError(f"{text} is past; give a later date, or a time from now: 12h, 90d, 4w")
    return moment
