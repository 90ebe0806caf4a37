"""The `kaon` command. Imports only the modules that the given subcommand needs."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config.config import Config

USAGE = """\
Kaon, an OpenAI-compatible LLM inference server

usage: kaon serve [MODEL] [flags]   serve a checkpoint directory or hub id; without MODEL the embedded model
       kaon chat [MODEL | URL]      chat in the terminal with a running server, or with one of its own
       kaon run-batch IN OUT [...]  answer the requests of a batch's file, without a server
       kaon quantize MODEL OUT      write a checkpoint with its weights quantised to 8 or 4 bits
       kaon pull ID [REVISION]      download what serving needs of a hub repository
       kaon list                    checkpoints in the hub's cache
       kaon rm ID [ID ...]          delete checkpoints from the hub's cache
       kaon doctor [--json]         show the devices and kernels of this machine, and any problems
       kaon kernels build [...]     compile a GPU's kernels for a model without the GPU
       kaon verify [MODEL] [flags]  check that answers do not depend on other requests, caching or restarts
       kaon key create|list|revoke  API keys in a file, with names, scopes, quotas and expiry
       kaon completion SHELL        completion of commands and flags: bash, zsh, fish, tcsh, powershell
       kaon --version

`kaon serve --help` and `kaon chat --help` list the flags.
"""

_BATCH_USAGE = """\
usage: kaon run-batch INPUT OUTPUT [MODEL] [flags]

Answers the requests in INPUT, one JSON object per line in the form of OpenAI's batches, and appends one answer per
line to OUTPUT. If it is started again, it continues with the lines that OUTPUT lacks. The flags are those of
kaon serve.
"""

_OK, _FAILED, _BAD_USAGE, _INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    _open_standard_streams()
    command, *arguments = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    try:
        return _COMMANDS.get(command, _unknown)(arguments, command)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe is gone (`kaon serve --help | head`). Otherwise the interpreter's last flush would
        # fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED


def _open_standard_streams() -> None:
    """Open `/dev/null` for each standard stream that is closed.

    Otherwise sockets would get these descriptors, and engine processes would use them as their standard streams.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # The lowest free descriptor is this one.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _serve(arguments: list[str], command: str) -> int:
    from server.signals import end_at_once

    end_at_once()  # The imports below take a second.
    from engine.config.settings import SettingsError, load_config, read_models
    from server.tracing import WrongVariable, requested_signals

    def read_config() -> "Config":
        config = load_config(arguments)
        # Mistakes in the models file and in environment variables are usage errors: a restart would not help.
        read_models(config)
        requested_signals(os.environ)
        return config

    try:
        config = read_config()
    except (SettingsError, WrongVariable) as error:
        return _complain(f"kaon serve: {error}", _BAD_USAGE)
    from server.process import run

    return run(config, read_config)


def _chat(arguments: list[str], command: str) -> int:
    from server.commands.chat import ChatError, run

    try:
        return run(arguments)
    except ChatError as error:
        return _complain(f"kaon chat: {error}", error.exit_code)


def _run_batch(arguments: list[str], command: str) -> int:
    if arguments[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_BATCH_USAGE)
        return _OK
    if len(arguments) < 2 or any(each.startswith("-") for each in arguments[:2]):
        return _complain(f"kaon run-batch: INPUT and OUTPUT are missing\n\n{_BATCH_USAGE.rstrip()}", _BAD_USAGE)
    from server.commands.run_batch import run  # It loads the web framework.

    source, target, *flags = arguments
    return run(source, target, flags)


def _checkpoints(arguments: list[str], command: str) -> int:
    from server.commands.checkpoints import run

    return run(arguments, command)


def _completion(arguments: list[str], command: str) -> int:
    """Print a completion script for a shell to evaluate: `eval "$(kaon completion bash)"`."""
    import argparse

    import shtab

    from engine.config.settings import serve_parser
    from server.commands.chat import chat_parser
    from server.commands.quantize import quantize_parser

    shells = shtab.SUPPORTED_SHELLS
    usage = f"usage: kaon completion {{{','.join(shells)}}}"
    if arguments in (["--help"], ["-h"]):
        sys.stdout.write(usage + "\n")
        return _OK
    if len(arguments) != 1 or arguments[0] not in shells:
        return _complain(usage, _BAD_USAGE)
    parser = argparse.ArgumentParser("kaon")
    commands = parser.add_subparsers()
    parsers = {"serve": serve_parser(), "chat": chat_parser(), "quantize": quantize_parser()}
    for name in _COMMANDS:
        if not name.startswith("-"):
            commands.add_parser(name, parents=[parsers[name]] if name in parsers else [], add_help=False, help=name)
    sys.stdout.write(shtab.complete(parser, arguments[0]))
    return _OK


def _key(arguments: list[str], command: str) -> int:
    from server.commands.key import KeyCommandError, run

    try:
        return run(arguments)
    except KeyCommandError as error:
        return _complain(f"kaon key: {error}", _BAD_USAGE if error.is_usage else _FAILED)


def _of_module(name: str) -> Callable[[list[str], str], int]:
    """Return the command of a module in `server.commands`, which is imported when the command runs."""

    def run(arguments: list[str], command: str) -> int:
        exit_code: int = import_module(f"server.commands.{name}").run(arguments)
        return exit_code

    return run


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
    "run-batch": _run_batch,
    "quantize": _of_module("quantize"),
    "pull": _checkpoints,
    "list": _checkpoints,
    "rm": _checkpoints,
    "doctor": _of_module("doctor"),
    "verify": _of_module("verify"),
    "kernels": _of_module("kernels"),
    "key": _key,
    "completion": _completion,
    "--version": _version,
    "-V": _version,
    "--help": _help,
    "-h": _help,
}
