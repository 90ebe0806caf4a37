"""`kaon serve` and `kaon chat` over the embedded model, as processes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from server.batches.store import BatchStore

KAON = [sys.executable, "-m", "server"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "KAON_DTYPE": "float32", "KAON_CPU_KVCACHE_GIB": "0.25"}
EMBEDDED = str(Path(__file__).parents[2] / "models" / "demo" / "checkpoint")
"""A name, so that chats start servers of their own, even if another server listens on this machine."""
PATIENCE = 120.0


def kaon(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KAON, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=PATIENCE, **options
    )


def test_a_bad_setting_ends_serve_with_one_sentence_and_exit_code_2() -> None:
    done = kaon("serve", "--max-num-seqs", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kaon serve: --max-num-seqs is 0; it must be greater than or equal to 1\n"


def test_a_checkpoint_that_is_not_there_ends_serve_with_one_sentence_before_a_core_starts(tmp_path: Path) -> None:
    coreless = "import sys; from server import cli, process; del process.CoreManager; sys.exit(cli.main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", coreless, "serve", str(tmp_path / "nowhere"), "--log-level", "error"]
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kaon: model is {tmp_path / 'nowhere'}, but there is no such directory; check the path\n"


def test_quantize_writes_a_directory_once(tmp_path: Path) -> None:
    """Its output is checked in tests/parity/test_quantize.py."""
    out = tmp_path / "out"
    done = kaon("quantize", EMBEDDED, str(out), "--quantization", "mxfp4")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out} is written; serve it with: kaon serve {out}\n"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    again = kaon("quantize", EMBEDDED, str(out))
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == f"kaon quantize: {out} exists; name a directory that does not, or remove it first\n"


@pytest.mark.slow  # The error message: tests/unit/config/test_settings.py.
def test_more_threads_than_cpus_end_serve_with_one_sentence_and_exit_code_1() -> None:
    done = kaon("serve", "--port", "0", "--cpu-threads", "1024", "--log-level", "error")
    cpus = len(os.sched_getaffinity(0))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"kaon: cpu_threads is 1024, but this process may use {cpus} CPUs; set it to at most {cpus}\n"
    )


def test_a_port_that_is_taken_ends_serve_with_one_sentence_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = kaon("serve", "--port", port)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"port {port}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_data_dir_of_another_server_ends_serve_with_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 10**6)
    with store.new_file() as file:
        store.add_file(file, "", "in.jsonl")
    done = kaon("serve", "--port", "0", "--data-dir", str(tmp_path), "--log-level", "error")
    store.close()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kaon: data_dir is {tmp_path}, which another server uses; give each its own\n"


READS = """
import sys, time
import engine.config.settings
engine.config.settings.load_config = lambda arguments: print("reads", flush=True) or time.sleep(600)
from server.cli import main
sys.exit(main(["serve"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_serve_reads_its_settings_ends_it_with_exit_code_0(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", READS], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reads\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        assert process.communicate() == (b"", b"")


def test_chat_with_a_server_of_its_own_answers_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Environment variables for public servers do not apply to the chat's own server.
    for name in ("KAON_API_KEY_FILE", "KAON_SSL_CERTFILE", "KAON_SSL_KEYFILE", "KAON_SSL_CA_CERTS"):
        monkeypatch.setitem(ENVIRONMENT, name, "/nowhere")
    monkeypatch.setitem(ENVIRONMENT, "KAON_API_KEY", "k")
    monkeypatch.setitem(ENVIRONMENT, "KAON_ROOT_PATH", "/prefix")
    done = kaon("chat", EMBEDDED, "--temperature", "0", "--max-tokens", "20", input="hello\n")
    # The server inherits this stderr too, whose end of file shows that the server has ended.
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_a_chat_that_is_killed_takes_its_server_along() -> None:
    chat = subprocess.Popen(
        [*KAON, "chat", EMBEDDED],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("hello\n")
    chat.stdin.flush()
    assert chat.stdout.readline()
    servers = psutil.Process(chat.pid).children(recursive=True)
    assert len(servers) == 2
    chat.send_signal(signal.SIGKILL)
    chat.wait(PATIENCE)
    assert psutil.wait_procs(servers, timeout=PATIENCE)[1] == []
    chat.stdin.close()
    chat.stdout.close()
