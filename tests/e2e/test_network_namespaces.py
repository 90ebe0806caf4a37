"""Two network namespaces as two hosts, connected by one virtual cable."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config.config import CLUSTER_KEY_ENV
from tests.e2e.kaon_host import FIELDS, KEY, KaonHost, parallel_fields
from tests.e2e.test_tensor_parallel import answers, engine_of

PORT = 29500
ROOT = Path(__file__).parents[2]

_FIRST = (
    "import json, sys\n"
    "from engine.config.config import ParallelConfig\n"
    "from engine.client.llm_engine import LLMEngine\n"
    "from tests.e2e.test_tensor_parallel import answers\n"
    "parallel, fields = map(json.loads, sys.argv[1:])\n"
    "with LLMEngine(parallel_config=ParallelConfig.model_validate(parallel), **fields) as engine:\n"
    "    print(repr(answers(engine)))"
)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Names of two namespaces with the addresses 10.213.7.1 and 10.213.7.2."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid():
        pytest.skip("network namespaces need root and the ip tool")
    names = [f"kaon-{os.getpid()}-{number}" for number in (1, 2)]
    cable = [f"kaon{os.getpid() % 10**7}{end}" for end in "ab"]
    commands = [["netns", "add", name] for name in names]
    commands += [["link", "add", cable[0], "type", "veth", "peer", "name", cable[1]]]
    for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
        commands += [["link", "set", end, "netns", name]]
        commands += [["-n", name, "address", "add", f"10.213.7.{number}/24", "dev", end]]
        commands += [["-n", name, "link", "set", device, "up"] for device in (end, "lo")]
    try:
        for command in commands:
            done = subprocess.run([ip, *command], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"this machine makes no network namespaces: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run([ip, "netns", "delete", name], capture_output=True)


@pytest.mark.slow  # Over two loopback addresses: test_several_hosts.py.
def test_hosts_that_share_no_network_but_a_cable_answer_what_one_does(namespaces: list[str], tmp_path: Path) -> None:
    with engine_of(1) as engine:
        expected = repr(answers(engine))
    meeting = {"master_addr": "10.213.7.1"}
    parallel = parallel_fields(PORT, **meeting)
    host = KaonHost(
        tmp_path / "host", PORT, within=["ip", "netns", "exec", namespaces[1]], parallel={**meeting, "node_rank": 1}
    )
    try:
        first = subprocess.run(
            ["ip", "netns", "exec", namespaces[0], sys.executable, "-c", _FIRST, *map(json.dumps, (parallel, FIELDS))],
            capture_output=True,
            text=True,
            env={**os.environ, CLUSTER_KEY_ENV: KEY},
            cwd=ROOT,
        )
        assert first.stdout.strip() == expected, first.stderr
        assert host.wait() == 0
    finally:
        host.stop()
