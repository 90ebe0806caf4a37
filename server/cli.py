"""The `kaon` command: `serve`, `chat`, `doctor`, `--version`. Imports what the command at hand needs, and no more."""

import os
import sys
from collections.abc import Callable, Sequence

USAGE = """\
Kaon, an OpenAI-compatible LLM inference server

usage: kaon serve [MODEL] [flags]   serve a checkpoint directory or hub id; without MODEL the embedded model
       kaon chat [MODEL] [flags]    chat in the terminal with a running server, or with one of its own
       kaon doctor [--json]         what models run on here, and what is wrong
       kaon --version

`kaon serve --help` and `kaon chat --help` list the flags.
"""

_OK, _FAILED, _BAD_USAGE, _INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    command, *arguments = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    try:
        return _COMMANDS.get(command, _unknown)(arguments, command)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader left (`kaon serve --help | head`); without this the interpreter's last flush would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED


def _serve(arguments: list[str], command: str) -> int:
    from engine.config.settings import SettingsError, load_config

    try:
        config = load_config(arguments)
    except SettingsError as error:
        return _complain(f"kaon serve: {error}", _BAD_USAGE)
    from server.process import run

    return run(config)


def _chat(arguments: list[str], command: str) -> int:
    from server.chat_client import ChatError, run

    try:
        return run(arguments)
    except ChatError as error:
        return _complain(f"kaon chat: {error}", error.exit_code)


def _doctor(arguments: list[str], command: str) -> int:
    from server.doctor import run

    return run(arguments)


def _version(arguments: list[str], command: str) -> int:
    from engine.config.release import release

    sys.stdout.write(f"kaon {release()}\n")
    return _OK


def _help(arguments: list[str], command: str) -> int:
    sys.stdout.write(USAGE)
    return _OK


def _unknown(arguments: list[str], command: str) -> int:
    from engine.config.spelling import nearest

    hint = nearest(command, _COMMANDS) or "; kaon --help lists the commands"
    return _complain(f"kaon: {command} is not a command{hint}", _BAD_USAGE)


def _complain(sentence: str, exit_code: int) -> int:
    sys.stderr.write(sentence + "\n")
    return exit_code


_COMMANDS: dict[str, Callable[[list[str], str], int]] = {
    "serve": _serve,
    "chat": _chat,
    "doctor": _doctor,
    "--version": _version,
    "-V": _version,
    "--help": _help,
    "-h": _help,
}
