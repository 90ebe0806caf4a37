"""The `kaon` command: exit codes, error messages of one sentence, and the few imports of each command."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import shtab

import server.process
from engine.config.config import Config
from engine.config.server import ServerConfig
from server.cli import main
from server.commands import chat

HEAVY = {"torch", "transformers", "fastapi", "uvicorn", "zmq", "httpx", "numpy"}


def imported_by(statement: str) -> set[str]:
    """Modules that are imported in a new interpreter after `statement`."""
    code = f"import sys\ntry:\n    {statement}\nexcept SystemExit: pass\nprint('modules:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("modules:")[2].split())


@pytest.mark.parametrize("is_installed", [True, False])
def test_version_is_the_packages(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = metadata.version("kaon")
    if not is_installed:

        def missing(name: str) -> str:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", missing)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kaon {installed}\n"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "kaon serve" in out
    assert "kaon chat" in out
    shells = out.partition("completion of commands and flags: ")[2].partition("\n")[0]
    assert set(shells.split(", ")) == set(shtab.SUPPORTED_SHELLS)


def test_closed_standard_streams_are_opened_for_it_and_its_processes() -> None:
    check = (
        "import os; raise SystemExit(any(os.readlink(f'/proc/self/fd/{each}') != '/dev/null' for each in range(3)))"
    )
    code = (
        "import subprocess, sys; from server.cli import main; "
        f"raise SystemExit(main(['--version']) or subprocess.call([sys.executable, '-c', {check!r}]))"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code], check=False)
    assert done.returncode == 0


def test_an_unknown_command_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert capsys.readouterr().err == "kaon: serv is not a command; did you mean serve?\n"


def test_serve_runs_the_server_with_the_configuration_and_passes_its_exit_code_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[Config] = []

    def run(config: Config, read_config: Callable[[], Config]) -> int:
        served.append(config)
        # After SIGHUP the same command is read again.
        assert read_config() == config
        return 7

    monkeypatch.setattr(server.process, "run", run)
    assert main(["serve", "some/model", "--port", "123"]) == 7
    assert (served[0].model, served[0].server_config.port) == ("some/model", 123)


def test_a_bad_setting_is_one_sentence_on_stderr_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "x"]) == 2
    reported = capsys.readouterr()
    assert (reported.out, reported.err) == ("", "kaon serve: --port is x; it must be a valid integer\n")


def test_an_address_of_another_machine_is_reported_as_such() -> None:
    with pytest.raises(OSError, match=r"^host is 192\.0\.2\.1, which is not an address of this machine$"):
        server.process._listen(ServerConfig(host="192.0.2.1", port=0), is_keyless=False)


def test_help_of_serve_has_every_section_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for reported in ("model and engine:", "parallel:", "server:", "--no-enable-prefix-caching", "(default: 8000)"):
        assert reported in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--url", "http://127.0.0.1:1", "model"], "MODEL starts a server and --url names a running one"),
        (["--temperature", "hot"], "invalid float value: 'hot'"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--url", "http://[::1"], "--url is http://[::1, which is not a URL"),
        (["--url", "localhost:8000"], "--url is localhost:8000; it must begin with http:// or https://"),
    ],
)
def test_a_bad_flag_of_chat_is_one_sentence_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kaon chat: ")
    assert said in err
    assert err.count("\n") == 1


def test_an_interrupted_command_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Config, read_config: Callable[[], Config]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(server.process, "run", interrupted)
    assert main(["serve"]) == 130


def test_chat_looks_where_serve_listens() -> None:
    default = Config().server_config
    assert (default.host, default.port) == (chat.DEFAULT_HOST, chat.DEFAULT_PORT)


def test_version_and_help_import_next_to_nothing() -> None:
    for argument in ("--version", "--help"):
        assert not imported_by(f"from server.cli import main; main(['{argument}'])") & (HEAVY | {"pydantic"})


def test_help_of_serve_and_reading_the_settings_import_nothing_heavy() -> None:
    assert not imported_by("from server.cli import main; main(['serve', '--help'])") & HEAVY
    assert not imported_by("from server.cli import main; main(['run-batch', '--help'])") & (HEAVY | {"pydantic"})
    assert not imported_by("from engine.config.settings import load_config; load_config([])") & HEAVY


# -- checkpoints of the hub -------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A cache with one whole checkpoint, one without weights, and a data set."""
    cache = tmp_path / "hub"
    for name, files in {
        "models--acme--whole": ("config.json", "model.safetensors"),
        "models--acme--part": ("config.json",),
        "datasets--acme--words": ("words.txt",),
    }.items():
        snapshot = cache / name / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (cache / name / "refs").mkdir()
        (cache / name / "refs" / "main").write_text("0" * 40)
        (cache / name / "blobs").mkdir()
        for file in files:
            (cache / name / "blobs" / file).write_bytes(bytes(1000))
            (snapshot / file).symlink_to(cache / name / "blobs" / file)
    return cache


def kaon(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: the hub's library reads the location of its cache when it is
    imported."""
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_cached_checkpoints_are_listed_and_deleted(hub_cache: Path) -> None:
    listed = kaon(hub_cache, "list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["ID", "acme/part", "acme/whole"]
    assert [line.endswith("incomplete") for line in listed] == [False, True, False]
    unknown = kaon(hub_cache, "rm", "acme/whole", "acme/other")
    assert (unknown.returncode, unknown.stderr) == (
        1,
        "kaon rm: acme/other is not in the cache; kaon list shows what is; nothing was deleted\n",
    )
    done = kaon(hub_cache, "rm", "acme/whole")
    assert done.stderr == ""
    assert done.stdout == "deleted acme/whole: 2.0K freed\n"
    assert not (hub_cache / "models--acme--whole").exists()
    assert (hub_cache / "datasets--acme--words").exists()


def test_a_checkpoint_that_the_hub_does_not_give_is_one_sentence(hub_cache: Path) -> None:
    missing = kaon(hub_cache, "pull", "acme/missing")
    assert missing.returncode == 1
    assert missing.stderr.startswith("kaon pull: model is acme/missing: no such directory, and as a hub id the hub")
    assert missing.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull"], "kaon pull: an ID is missing; "),
        (["pull", "a", "b", "c"], "kaon pull: the arguments a b c are not understood; "),
        (["list", "x"], "kaon list: the argument x is not understood; "),
        (["rm"], "kaon rm: an ID is missing; "),
        (["rm", "--all"], "kaon rm: the argument --all is not understood; "),
    ],
)
def test_a_wrong_use_of_these_commands_shows_the_right_one(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"{said}usage: kaon {arguments[0]}")


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        ("absent", "out", "INPUT is {0}/absent, which cannot be read: No such file or directory"),
        (".", "out", "INPUT is {0}/., which cannot be read: Is a directory"),
        ("in", "absent/out", "OUTPUT is {0}/absent/out, which cannot be written: No such file or directory"),
        ("in", ".", "OUTPUT is {0}/., which cannot be written: Is a directory"),
    ],
)
def test_a_batch_without_its_files_is_refused_in_a_sentence(
    source: str, target: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = '{"model": "kaon-demo", "prompt": "a"}'
    (tmp_path / "in").write_text(f'{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {body}}}\n')
    assert main(["run-batch", f"{tmp_path}/{source}", f"{tmp_path}/{target}"]) == 2
    assert capsys.readouterr().err == f"kaon run-batch: {sentence.format(tmp_path)}\n"


# -- completion -------------------------------------------------------------------------------------------------


def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def completed(*words: str) -> set[str]:
        ask = f'COMP_WORDS=("kaon" {" ".join(map(repr, words))}); COMP_CWORD={len(words)}; _shtab_kaon'
        print_them = "printf '%s\\n' \"${COMPREPLY[@]}\""
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}\n{print_them}"], capture_output=True, text=True, check=True
        )
        return set(done.stdout.split())

    assert {"serve", "chat", "pull", "doctor"} <= completed("")
    assert {"--max-num-seqs", "--max-num-batched-tokens"} <= completed("serve", "--max-num")
    assert completed("chat", "--temp") == {"--temperature"}


@pytest.mark.parametrize("arguments", [[], ["ksh"], ["bash", "zsh"]])
def test_other_shells_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *arguments]) == 2
    assert capsys.readouterr().err.startswith("usage: kaon completion {bash,zsh,")


def test_what_starts_the_core_loads_no_web_framework_and_no_templates_before() -> None:
    modules = imported_by("import server.process")
    assert not modules & (HEAVY - {"zmq"} | {"jinja2", "prometheus_client", "tokenizers"})


def test_completion_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: kaon completion {bash,zsh,")
