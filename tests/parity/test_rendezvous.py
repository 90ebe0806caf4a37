"""Data and ports of ranks on several hosts that other users could read or reach: their store and their sockets."""

import json
import os
import pickletools
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.config import CLUSTER_KEY_ENV
from models.parallel.process_group import Rendezvous

ROOT = Path(__file__).parents[2]
SECRET = "a-cluster-key-that-nobody-else-may-know"

RANK = """
import json, os, sys
from urllib.parse import urlsplit
import psutil, torch
from engine.distributed.remote_ranks import listening_socket
from models.parallel.process_group import ProcessGroupCollectives, Rendezvous
rank, address, interface = int(sys.argv[1]), sys.argv[2], sys.argv[3] or None
url, listener = urlsplit(address), None
if url.port and rank == 0:
    listener = listening_socket(url.hostname, url.port).detach()
group = ProcessGroupCollectives(rank, 2, torch.device("cpu"), Rendezvous(address, 60.0, listener, interface))
group.join()
x = torch.full((3,), rank + 1.0)
total = group.all_reduce(x)
opened = {each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}
stored = open(address[7:], "rb").read().hex() if address.startswith("file") else ""
print(json.dumps({"sum": total.tolist(), "listens": sorted(opened), "stored": stored}), flush=True)
group.all_reduce(x)
group.close()
os._exit(0)
"""


def ranks(address: str, interface: str = "") -> list[dict[str, Any]]:
    """The output of two ranks that have met at `address` and computed a sum."""
    environment = {**os.environ, CLUSTER_KEY_ENV: SECRET, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", RANK, str(rank), address, interface],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate()[0] for process in started]
    return [json.loads(each.splitlines()[-1]) for each in said]


def entries(content: bytes) -> Iterator[bytes]:
    """The keys and values in the file of torch's `FileStore`: each is its length, in 4 bytes, and its bytes."""
    at = 0
    while at < len(content):
        [length] = struct.unpack_from("@I", content, at)
        at += 4
        yield content[at : at + length]
        at += length


def is_pickle(value: bytes) -> bool:
    """Whether a value is a pickle from its first byte to its last."""
    try:
        operations = [operation.name for operation, _, _ in pickletools.genops(value)]
    except (ValueError, IndexError, UnicodeDecodeError):
        return False
    return len(operations) > 2 or operations[:1] == ["PROTO"]


def test_the_store_of_a_group_holds_addresses_no_secrets_and_no_pickles(tmp_path: Path) -> None:
    said = ranks((tmp_path / "store").as_uri())
    assert [each["sum"] for each in said] == [[3.0] * 3] * 2
    content = bytes.fromhex(said[0]["stored"])
    found = list(entries(content))
    assert len(found) >= 4
    assert SECRET.encode() not in content
    assert [value for value in found if is_pickle(value)] == []


def test_a_pickle_would_be_found() -> None:
    import pickle

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert is_pickle(pickle.dumps({"a": [1]}, protocol))
    assert not is_pickle(b"127.0.0.1")


def test_no_collective_of_objects_which_pickles_is_called() -> None:
    calls = re.compile(r"\b\w*(?:_object|_object_list|_objects)\(|\bmonitored_barrier\(|\brpc\.")
    packages = ("kaon", "server", "engine", "kvcache", "models")
    guilty = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if "torch.distributed" in (text := path.read_text(encoding="utf-8"))
        for match in calls.finditer(text)
    ]
    assert guilty == []


def test_the_store_and_collectives_of_a_named_interface_listen_at_its_address_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = ranks(f"tcp://127.0.0.1:{port}", "lo")
    assert [each["sum"] for each in said] == [[3.0] * 3] * 2
    assert [each["listens"] for each in said] == [["127.0.0.1"]] * 2


def test_an_interface_that_a_host_does_not_have_is_reported_with_those_that_it_has() -> None:
    rendezvous = Rendezvous("tcp://127.0.0.1:9", 1.0, interface="wg9")
    with pytest.raises(RuntimeError, match=r"cluster_interface is wg9, which this host does not have; it has .*lo"):
        rendezvous.interface()
    assert Rendezvous("tcp://127.0.0.1:9", 1.0, interface="lo").interface() == "lo"
    assert Rendezvous("file:///tmp/x", 1.0, interface="wg9").interface() == "lo"


@pytest.mark.parametrize(("interface", "used"), [(None, "eth7"), ("lo", "lo")])
def test_a_named_interface_wins_over_the_variable_of_the_library(
    interface: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    Rendezvous("tcp://127.0.0.1:9", 1.0, interface=interface).set_interface("NCCL_SOCKET_IFNAME")
    assert os.environ["NCCL_SOCKET_IFNAME"] == used
