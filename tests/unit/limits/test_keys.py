"""API keys: the file that `kaon key` writes, the permissions of each key, and the immediate effect of a changed
file."""

import asyncio
import errno
import hmac
import json
import os
import re
import stat
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.config.server import ServerConfig
from server.cli import main
from server.errors import InvalidApiKey
from server.limits.key_file import KeyFile
from server.limits.keys import ApiKeys
from server.limits.owners import Owner, Quotas, digest_of


def command(*arguments: str) -> int:
    return main(["key", *arguments])


def created(capsys: pytest.CaptureFixture[str], *arguments: str) -> bytes:
    assert command("create", *arguments) == 0
    return capsys.readouterr().out.strip().encode()


def expire(file: Path, name: str) -> None:
    """Let the expiry of a key have passed."""
    records = KeyFile.load(file)
    next(record for record in records.keys if record.name == name).expires = datetime(2020, 1, 1, tzinfo=UTC)
    records.save(file)


def keys_of(file: Path) -> ApiKeys:
    return ApiKeys.of(ServerConfig(api_key_file=str(file)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_created_key_is_accepted_and_is_nowhere_in_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = created(capsys, "alice", "--file", str(file))
    assert key.startswith(b"kaon-")
    assert len(key) >= 43
    assert key not in file.read_bytes()
    owner = keys_of(file).owner(key)
    assert owner is not None
    assert (owner.name, owner.scopes, owner.weight, owner.group) == ("alice", {"inference"}, 1.0, None)
    assert keys_of(file).owner(key + b"x") is None


def test_a_key_has_the_scopes_group_weight_and_quotas_that_it_was_given(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--scope", "metrics", "--scope", "inference", "--group", "team", "--weight", "2.5"]
    options += ["--requests-per-minute", "60", "--output-tokens-per-minute", "5000"]
    key = created(capsys, "bob", "--file", str(file), *options)
    owner = keys_of(file).owner(key)
    assert owner is not None
    assert owner.scopes == {"inference", "metrics"}
    assert (owner.group, owner.weight, owner.quotas) == ("team", 2.5, Quotas(60, None, 5000))
    assert owner.prefix_domain == Owner("x", "x", group="team").prefix_domain != owner.key


def test_the_file_is_replaced_whole_and_only_its_owner_may_read_it(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    created(capsys, "alice", "--file", str(file))
    before = file.stat().st_ino
    created(capsys, "bob", "--file", str(file))
    assert file.stat().st_ino != before
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == [file.name]


def test_the_list_shows_names_and_no_secret(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = created(capsys, "alice", "--file", str(file)).decode()
    expire(file, "alice")
    assert command("list", "--file", str(file)) == 0
    shown = capsys.readouterr().out
    assert "alice" in shown
    assert "(expired)" in shown
    assert key not in shown


def test_a_revoked_key_opens_nothing_and_an_empty_file_does_not_open_the_server(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = created(capsys, "alice", "--file", str(file))
    keys = keys_of(file)
    assert keys.owner(key) is not None
    assert command("revoke", "alice", "--file", str(file)) == 0
    keys.reload()
    assert keys.owner(key) is None
    assert keys


def test_the_refusal_of_two_records_of_one_key_names_them_and_the_remedy(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    created(capsys, "alice", "--file", str(file))
    created(capsys, "bob", "--file", str(file))
    digests = re.findall(r'"digest": "(\w+)"', file.read_text())
    file.write_text(file.read_text().replace(digests[1], digests[0]))
    with pytest.raises(ValueError, match=r"alice and bob have the same digest.*remove one of the two records"):
        keys_of(file)


def test_an_expired_key_is_refused_in_words(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = created(capsys, "alice", "--file", str(file))
    expire(file, "alice")
    with pytest.raises(InvalidApiKey, match="has expired"):
        keys_of(file).owner(key)
    later = created(capsys, "bob", "--file", str(file), "--expires", "90d")
    assert keys_of(file).owner(later) is not None


def test_only_keys_that_may_ask_for_answers_share_connections(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    created(capsys, "alice", "--file", str(file))
    created(capsys, "prometheus", "--file", str(file), "--scope", "metrics")
    keys = keys_of(file)
    assert not keys.has_several_holders
    created(capsys, "bob", "--file", str(file))
    keys.reload()
    assert keys.has_several_holders


async def test_a_running_server_takes_new_keys_and_keeps_the_old_ones_of_a_broken_file(
    file: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.limits.keys._RELOAD_SECONDS", 0.001)
    first = created(capsys, "alice", "--file", str(file))
    keys = keys_of(file)
    watching = asyncio.create_task(keys.watch())
    second = created(capsys, "bob", "--file", str(file))
    while keys.owner(second) is None:
        await asyncio.sleep(0.001)
    assert [owner and owner.key_name for owner in map(keys.owner, (first, second))] == ["alice", "bob"]
    whole = file.read_text()
    same_digest = re.sub(r'"digest": "\w+"', f'"digest": "{digest_of(first.decode())}"', whole)
    for broken in ("", whole[:-30], whole.replace('"bob"', '"alice"'), same_digest, '{"version": 2, "keys": []}'):
        caplog.clear()
        file.write_text(broken)
        while not caplog.text:
            await asyncio.sleep(0.001)
        assert "the keys that were read before stay in force" in caplog.text
        assert keys.owner(first) is not None
        assert keys.owner(second) is not None
    for put in (file.symlink_to, os.mkfifo, changeable_by_all):
        # The thread of the server's event loop reads the file: it must not wait for a pipe, or read an endless device.
        caplog.clear()
        file.unlink()
        put("/dev/zero") if put == file.symlink_to else put(file)
        while not caplog.text:
            await asyncio.sleep(0.001)
        assert keys.owner(first) is not None
    caplog.clear()
    file.unlink()
    while not caplog.text:
        await asyncio.sleep(0.001)
    assert keys.owner(first) is not None
    watching.cancel()


async def test_a_file_that_is_being_written_takes_no_key_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of it follows after each look at the file."""
    monkeypatch.setattr("server.limits.keys._RELOAD_SECONDS", 0.0)
    file = tmp_path / "plain"
    file.write_text("sk-first\nsk-second\n")
    keys = keys_of(file)
    watching = asyncio.create_task(keys.watch())
    for content in ("sk-f", "sk-first\n", "sk-first\nsk-sec", "sk-first\nsk-second\nsk-third\n"):
        file.write_text(content)
        await asyncio.sleep(0)  # One look at the file.
        assert keys.owner(b"sk-second") is not None
        assert keys.owner(b"sk-f") is None
    while keys.owner(b"sk-third") is None:
        await asyncio.sleep(0)
    watching.cancel()


async def test_a_file_that_changes_at_each_look_is_read_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.limits.keys._RELOAD_SECONDS", 0.0)
    file = tmp_path / "plain"
    file.write_text("sk-first\nsk-second\n")
    keys = keys_of(file)
    watching = asyncio.create_task(keys.watch())
    for number in range(20):
        file.write_text("sk-first\n" + "#" * number)
        await asyncio.sleep(0)  # One look at the file.
    assert keys.owner(b"sk-second") is None
    assert keys.owner(b"sk-first") is not None
    watching.cancel()


def changeable_by_all(file: Path) -> None:
    KeyFile(1, []).save(file)
    file.chmod(0o666)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "alice", "--file", "{file}"], "there is a key of the name alice"),
        (["create", "a b", "--file", "{file}"], "name"),
        (["create", "bob", "--file", "{file}", "--weight", "0"], "weight"),
        (["create", "bob", "--file", "{file}", "--requests-per-minute", "-1"], "requests_per_minute"),
        (["revoke", "bob", "--file", "{file}"], "there is no key of the name bob"),
        (["create", "bob", "--file", "{plain}"], "plain keys"),
        (["list", "--file", "{file}/x"], "Not a directory"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    file: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    created(capsys, "alice", "--file", str(file))
    plain = file.with_name("plain")
    plain.write_text("sk-one\n")
    before = file.read_text()
    assert command(*(each.format(file=file, plain=plain) for each in arguments)) == 1
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1
    assert (file.read_text(), plain.read_text()) == (before, "sk-one\n")


@pytest.mark.parametrize(
    "arguments", [[], ["make"], ["create"], ["create", "a"], ["create", "a", "--file", "f", "--scope", "root"]]
)
def test_bad_usage_of_the_command_is_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAON_API_KEY_FILE", raising=False)
    assert command(*arguments) == 2
    assert capsys.readouterr().err.startswith("kaon key: ")


def test_a_key_that_could_not_be_shown_is_not_kept(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    created(capsys, "alice", "--file", str(file))
    before = file.read_bytes()
    for arguments in (["create", "bob"], ["list"]):
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", full)
            assert command(*arguments, "--file", str(file)) == 1
        assert capsys.readouterr().err == "kaon key: standard output cannot be written: No space left on device\n"
    assert file.read_bytes() == before


def test_a_key_that_was_shown_but_not_stored_is_said_to_be_invalid(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert command("create", "alice", "--file", str(file)) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("kaon-")
    sentence = f"{file} cannot be written: No space left on device; the key that was shown is not valid"
    assert shown.err == f"kaon key: {sentence}\n"


def test_a_key_that_would_open_nothing_is_not_created(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("create", "alice", "--file", str(file), "--expires", "2020-01-01") == 2
    assert "--expires: 2020-01-01 is past; give a later date" in capsys.readouterr().err
    assert not file.exists()


def test_commands_at_the_same_time_lose_no_key_and_readers_find_whole_files(file: Path) -> None:
    KeyFile(1, []).save(file)
    seen: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(len(KeyFile.load(file).keys))

    def write(name: str) -> None:
        for number in range(10):
            assert command("create", f"{name}{number}", "--file", str(file)) == 0

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert seen == sorted(seen)
    assert len(KeyFile.load(file).keys) == 30


def test_many_keys_are_looked_up_without_a_comparison_of_each(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = KeyFile(1, [])
    made = [content.create(f"key{number}").encode() for number in range(3000)]
    content.save(file)
    keys = keys_of(file)
    compared: list[object] = []
    original = hmac.compare_digest
    monkeypatch.setattr("server.limits.keys.hmac.compare_digest", lambda a, b: compared.append(a) or original(a, b))
    assert all(keys.owner(key) is not None for key in made)
    assert keys.owner(b"kaon-none") is None
    assert len(compared) == len(made)


def test_the_file_says_what_it_holds_in_json(file: Path) -> None:
    content = KeyFile(1, [])
    content.create("alice", group="team")
    content.save(file)
    record = json.loads(file.read_text())["keys"][0]
    assert {"name", "digest", "created", "scopes", "group"} == record.keys()
    assert time.time() - 3600 < KeyFile.load(file).keys[0].created.timestamp() <= time.time()


def test_work_without_a_client_has_its_keys_owner_until_the_key_is_revoked_or_expires(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    created(capsys, "alice", "--file", str(file), "--group", "team")
    created(capsys, "old", "--file", str(file))
    expire(file, "old")
    alice, old = (record.digest for record in KeyFile.load(file).keys)
    keys = keys_of(file)
    owner = keys.holder(alice)
    assert owner is not None
    assert (owner.name, owner.group) == ("alice", "team")
    assert keys.holder(old) is None
    assert keys.holder("f" * 64) is None
    assert command("revoke", "alice", "--file", str(file)) == 0
    keys.reload()
    assert keys.holder(alice) is None
    assert ApiKeys().holder(alice) == Owner.of_key(alice)
