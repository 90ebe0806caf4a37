"""The Kubernetes manifests are consistent with each other and with Kaon's settings. No cluster is used."""

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config.config import CLUSTER_KEY_ENV, Config
from engine.config.settings import load_config

ROOT = Path(__file__).parents[3]
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("kaon*.yaml"))
OTHERS = [ROOT / "deploy" / "kubernetes" / f"{name}.yaml" for name in ("kserve", "ray")]
"""Kinds of platforms that create pods from templates of their own."""
NODE_RANK_ENV = "KAON_NODE_RANK"


def objects(path: Path) -> dict[str, dict[str, Any]]:
    """Objects by kind and name."""
    found = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


def workload(path: Path) -> dict[str, Any]:
    [found] = (each for each in objects(path).values() if each["kind"] in {"Deployment", "StatefulSet"})
    return found


def container(path: Path) -> dict[str, Any]:
    [found] = workload(path)["spec"]["template"]["spec"]["containers"]
    return found


def served(path: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> Config:
    """The settings that `kaon` reads from a manifest's arguments and variables, in a cluster that sets
    `environment`."""
    for variable in container(path)["env"]:
        name = variable["name"]
        if "value" in variable or name in environment:
            monkeypatch.setenv(name, variable.get("value", environment.get(name)))
    command, *arguments = container(path)["args"]
    assert command == "serve"
    return load_config(arguments)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_s_arguments_and_variables_are_kaon_s(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = served(path, monkeypatch, KAON_API_KEY="a-key-of-an-api-client", KAON_NODE_RANK="0")
    [port] = (port["containerPort"] for port in container(path)["ports"] if port["name"] == "http")
    assert config.server_config.port == port
    assert config.server_config.host == "0.0.0.0"
    assert not config.server_config.insecure_no_auth
    [keys] = (variable["valueFrom"] for variable in container(path)["env"] if variable["name"] == "KAON_API_KEY")
    assert keys["secretKeyRef"].get("optional") is None  # Without the secret no pod starts.
    known = {"KAON_API_KEY", NODE_RANK_ENV, CLUSTER_KEY_ENV}
    assert {variable["name"] for variable in container(path)["env"]} <= known


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_s_selectors_find_its_pods(path: Path) -> None:
    template = workload(path)["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert workload(path)["spec"]["selector"]["matchLabels"] == labels
    assert template["spec"]["enableServiceLinks"] is False
    # The label that the cluster itself adds to the pods of a StatefulSet.
    numbered = {**labels, "apps.kubernetes.io/pod-index": "0"}
    services = [each for each in objects(path).values() if each["kind"] == "Service"]
    assert services
    for service in services:
        assert service["spec"]["selector"].items() <= numbered.items()
    mounts = {mount["name"] for mount in container(path)["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_ranks_of_a_pod_have_shared_memory(path: Path) -> None:
    [mount] = (each for each in container(path)["volumeMounts"] if each["mountPath"] == "/dev/shm")
    volumes = {volume["name"]: volume for volume in workload(path)["spec"]["template"]["spec"]["volumes"]}
    assert volumes[mount["name"]]["emptyDir"]["medium"] == "Memory"


def templates(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The pods' templates of all workloads, as metadata and spec."""
    pods: list[dict[str, Any]] = []
    for each in found.values():
        spec = each.get("spec", {})
        match each["kind"]:
            case "Deployment" | "StatefulSet":
                pods.append(spec["template"])
            case "LeaderWorkerSet":
                pods.append(spec["leaderWorkerTemplate"]["workerTemplate"])
            case "ServingRuntime":
                pods.append({"metadata": {"labels": {}}, "spec": spec})
            case "RayJob":
                cluster = spec["rayClusterSpec"]
                pods += [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return pods


def pod_faults(pod: dict[str, Any]) -> list[str]:
    """Violations of the profile `restricted` of Kubernetes' Pod Security Standards, and of further rules, by a pod."""
    volumes = pod.get("volumes", [])
    found = []
    for box in (*pod.get("initContainers", ()), *pod["containers"]):
        context = {**pod.get("securityContext", {}), **box.get("securityContext", {})}
        rules = {
            "it may run as root": context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0,
            "its root is writable": context.get("readOnlyRootFilesystem") is True,
            "it may gain privileges": context.get("allowPrivilegeEscalation") is False,
            "it is privileged": not context.get("privileged"),
            "it keeps capabilities": context.get("capabilities") == {"drop": ["ALL"]},
            "no seccomp profile": context.get("seccompProfile") == {"type": "RuntimeDefault"},
            "memory has no limit": "memory" in box["resources"].get("limits", {}),
            "nothing is requested": {"cpu", "memory"} <= box["resources"].get("requests", {}).keys(),
            "/tmp is not writable": "/tmp" in {mount["mountPath"] for mount in box["volumeMounts"]},
            "a port of the host is open": not any("hostPort" in port for port in box.get("ports", ())),
            "a secret is optional": not any(
                variable.get("valueFrom", {}).get("secretKeyRef", {}).get("optional")
                for variable in box.get("env", ())
            ),
        }
        found += [fault for fault, holds in rules.items() if not holds]
    context = pod.get("securityContext", {})
    rules = {
        "modes of files change at each mount": "fsGroup" not in context
        or context.get("fsGroupChangePolicy") == "OnRootMismatch",
        "it shares a namespace of the host": not any(pod.get(f"host{name}") for name in ("Network", "PID", "IPC")),
        "it mounts the host's files": not any("hostPath" in volume for volume in volumes),
        "a volume has no limit": all("sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}) for volume in volumes),
    }
    return found + [fault for fault, holds in rules.items() if not holds]


def faults(found: dict[str, dict[str, Any]]) -> list[str]:
    """Violations by the manifests of a workload, including its network policy."""
    policies = [each["spec"] for each in found.values() if each["kind"] == "NetworkPolicy"]
    faults = []
    for template in templates(found):
        labels = template["metadata"]["labels"]
        mine = [each for each in policies if each["podSelector"].get("matchLabels", {}).items() <= labels.items()]
        faults += pod_faults(template["spec"])
        if template["spec"].get("automountServiceAccountToken") is not False:
            faults.append("it mounts a token of the cluster")
        if {direction for policy in mine for direction in policy["policyTypes"]} != {"Ingress", "Egress"}:
            faults.append("its network is open")
    return faults


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_meets_the_restricted_profile_and_leaves_nothing_open(path: Path) -> None:
    assert faults(objects(path)) == []


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_pods_of_other_platforms_meet_the_profile_too(path: Path) -> None:
    found = templates(objects(path))
    assert found
    assert [fault for template in found for fault in pod_faults(template["spec"])] == []


def test_the_arguments_of_other_platforms_are_kaon_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_API_KEY", "a-key-of-an-api-client")
    runtime = objects(OTHERS[0])["ServingRuntime/kaon"]["spec"]["containers"][0]
    command, *arguments = runtime["args"]
    config = load_config(arguments)
    assert command == "serve"
    assert config.server_config.port == runtime["ports"][0]["containerPort"] == 8080
    program, command, *arguments = objects(OTHERS[1])["RayJob/kaon"]["spec"]["entrypoint"].split()
    assert (program, command) == ("kaon", "serve")
    assert load_config(arguments).parallel_config.distributed_executor_backend == "ray"


def test_the_base_of_kustomize_is_the_manifest() -> None:
    kustomization = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "kustomization.yaml").read_text())
    assert kustomization["resources"] == ["kaon.yaml"]


def test_the_chart_s_values_are_those_of_its_schema() -> None:
    def keys(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> set[str]:
        found = set()
        for name, value in values.items():
            assert name in schema["properties"], f"{path}{name}"
            found.add(path + name)
            if isinstance(value, dict) and "properties" in schema["properties"][name]:
                found |= keys(value, schema["properties"][name], f"{path}{name}.")
        return found

    chart = ROOT / "deploy" / "helm" / "kaon"
    schema = json.loads((chart / "values.schema.json").read_text())
    assert keys(yaml.safe_load((chart / "values.yaml").read_text()), schema)
    for example in (chart / "examples").glob("*.yaml"):
        keys(yaml.safe_load(example.read_text()), schema)


def test_the_pages_name_values_of_the_chart() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "kaon" / "values.yaml").read_text())
    for page in ("kubernetes", "routers"):
        text = (ROOT / "docs" / "deploy" / f"{page}.md").read_text()
        named = re.findall(r"`([a-z]\w*(?:\.(?!yaml|json)\w+)+)`|--set ([\w.]+)", text)
        assert named
        for path in ("".join(each) for each in named):
            value: Any = values
            for key in path.split("."):
                assert path.startswith("settings.") or key in value, f"{page}.md: {path}"
                value = value.get(key) if isinstance(value, dict) else None


HARDENING = [
    ("it may run as root", "runAsNonRoot: true", "runAsNonRoot: false"),
    ("its root is writable", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
    ("it may gain privileges", "allowPrivilegeEscalation: false", "privileged: false"),
    ("it keeps capabilities", "drop: [ALL]", "drop: [NET_RAW]"),
    ("no seccomp profile", "type: RuntimeDefault", "type: Unconfined"),
    ("it mounts a token of the cluster", "automountServiceAccountToken: false", "hostNetwork: false"),
    ("it shares a namespace of the host", "automountServiceAccountToken: false", "hostIPC: true"),
    ("a volume has no limit", "{medium: Memory, sizeLimit: 2Gi}", "{medium: Memory}"),
    ("it mounts the host's files", "emptyDir: {sizeLimit: 1Gi}", "hostPath: {path: /tmp}"),
    ("memory has no limit", "limits: {memory: 8Gi}", "limits: {}"),
    ("its network is open", "policyTypes: [Ingress, Egress]", "policyTypes: [Ingress]"),
    (
        "its network is open",
        "  podSelector: {matchLabels: {app: kaon}}\n  policy",
        "  podSelector: {matchLabels: {app: x}}\n  policy",
    ),
    ("modes of files change at each mount", "fsGroupChangePolicy: OnRootMismatch", "fsGroupChangePolicy: Always"),
    ("a secret is optional", "key: keys}", "key: keys, optional: true}"),
]


@pytest.mark.parametrize(("fault", "given", "changed"), HARDENING)
def test_each_rule_finds_a_manifest_without_it(fault: str, given: str, changed: str, tmp_path: Path) -> None:
    text = MANIFESTS[0].read_text(encoding="utf-8")
    assert given in text
    weaker = tmp_path / "weaker.yaml"
    weaker.write_text(text.replace(given, changed))
    assert fault in faults(objects(weaker))


TWO_HOSTS = ROOT / "deploy" / "kubernetes" / "kaon-two-hosts.yaml"


def test_each_of_two_pods_is_the_host_of_its_number_and_reaches_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects(TWO_HOSTS)
    stateful = found["StatefulSet/kaon"]["spec"]
    for index in range(stateful["replicas"]):
        parallel = served(TWO_HOSTS, monkeypatch, KAON_NODE_RANK=str(index)).parallel_config
        assert parallel.node_rank == index
        assert parallel.nnodes == stateful["replicas"]
        assert parallel.tensor_parallel_size % parallel.nnodes == 0
    headless = found[f"Service/{stateful['serviceName']}"]["spec"]
    assert parallel.master_addr == f"kaon-0.{stateful['serviceName']}"
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"] is True
    assert [port["port"] for port in headless["ports"]] == [parallel.master_port]
    sources = {variable["name"]: variable["valueFrom"] for variable in container(TWO_HOSTS)["env"]}
    assert sources[NODE_RANK_ENV]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    assert not sources[CLUSTER_KEY_ENV]["secretKeyRef"].get("optional")


def test_the_other_pods_outlast_the_first_one_s_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = served(TWO_HOSTS, monkeypatch, KAON_NODE_RANK="0").server_config.drain_timeout
    shell = container(TWO_HOSTS)["lifecycle"]["preStop"]["exec"]["command"]
    assert drain + slept(shell, 0) < slept(shell, 1)
    assert slept(shell, 1) < workload(TWO_HOSTS)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


def slept(command: list[str], node_rank: int) -> int:
    """The seconds for which a preStop hook sleeps, from the `sleep` in its command."""
    shell = ["sh", "-c", 'sleep() { echo "$1"; }; ' + command[-1]]
    said = subprocess.run(shell, env={"KAON_NODE_RANK": str(node_rank)}, capture_output=True, text=True, check=True)
    return int(said.stdout)


def drain_of(arguments: list[str]) -> float:
    """Seconds until a server with these arguments has ended."""
    return load_config(arguments).server_config.drain_timeout


@pytest.mark.parametrize("path", [*MANIFESTS, *OTHERS], ids=lambda path: path.stem)
def test_a_pod_that_ends_is_off_the_lists_first_and_has_the_time_to_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = objects(path)
    monkeypatch.setenv("KAON_API_KEY", "a-key-of-an-api-client")
    monkeypatch.setenv(NODE_RANK_ENV, "0")
    monkeypatch.setenv(CLUSTER_KEY_ENV, "a-key-of-the-hosts-of-one-cluster")
    for template in templates(found):
        pod = template["spec"]
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        before = int(command[1]) if command[0] == "sleep" else slept(command, 0)
        if path.stem == "ray":
            drain = drain_of(found["RayJob/kaon"]["spec"]["entrypoint"].split()[2:])
        else:
            drain = drain_of(pod["containers"][0]["args"][1:])
        spec = found["InferenceService/qwen3"]["spec"]["predictor"] if path.stem == "kserve" else pod
        assert before >= 5
        assert before + drain + 10 <= spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("path", [*MANIFESTS, OTHERS[1]], ids=lambda path: path.stem)
def test_pods_may_ask_name_servers_wherever_these_listen(path: Path) -> None:
    policy = objects(path)["NetworkPolicy/kaon"]["spec"]
    open_to_all = [port for rule in policy["egress"] if "to" not in rule for port in rule["ports"]]
    for port in (53, 5353):
        for protocol in ("UDP", "TCP"):
            assert {"port": port, "protocol": protocol} in open_to_all


def test_what_scrapes_by_annotation_needs_no_key() -> None:
    runtime = objects(OTHERS[0])["ServingRuntime/kaon"]["spec"]
    [box] = runtime["containers"]
    [keyless] = (each["value"] for each in box["env"] if each["name"] == "KAON_KEYLESS_PATHS")
    assert runtime["annotations"]["prometheus.kserve.io/path"] in keyless.split(",")
    assert runtime["annotations"]["prometheus.kserve.io/port"] == str(box["ports"][0]["containerPort"])


def test_probes_of_ray_s_nodes_are_the_manifest_s_own() -> None:
    """By default an operator probes with programs that the image does not have."""
    for template in templates(objects(OTHERS[1])):
        [box] = template["spec"]["containers"]
        assert {box[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")} == {"/api/healthz"}


def test_http_is_asked_of_the_first_pod_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert objects(TWO_HOSTS)["Service/kaon"]["spec"]["selector"]["apps.kubernetes.io/pod-index"] == "0"
    monkeypatch.setenv("KAON_PORT", "9")  # An address without a listener.
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        _, flag, module, path = container(TWO_HOSTS)[name]["exec"]["command"]
        assert flag == "-m"
        monkeypatch.setattr("sys.argv", [module, path])
        for index, code in (("0", 1), ("1", 0)):
            monkeypatch.setenv(NODE_RANK_ENV, index)
            with pytest.raises(SystemExit) as ended:
                runpy.run_module(module, run_name="__main__")
            assert ended.value.code == code


def test_no_service_s_variables_reach_the_server_on_kserve() -> None:
    # A Service named kaon causes variables that begin like the server's settings, which the server refuses.
    assert objects(OTHERS[0])["InferenceService/qwen3"]["spec"]["predictor"]["enableServiceLinks"] is False


def test_values_of_the_router_name_what_the_pods_have() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "llm-d-router-values.yaml").read_text(encoding="utf-8"))
    example = yaml.safe_load((ROOT / "deploy/helm/kaon/examples/production.yaml").read_text(encoding="utf-8"))
    config = yaml.safe_load(values["router"]["epp"]["pluginsCustomConfig"]["kaon.yaml"])
    plugins = {each["type"]: each.get("parameters", {}) for each in config["plugins"]}
    assert plugins["metrics-data-source"]["scheme"] == ("https" if "tls" in example else "http")
    events = plugins["precise-prefix-cache-producer"]
    assert events["tokenProcessorConfig"]["blockSizeTokens"] == Config().kv_cache_block_size
    assert values["router"]["tokenizer"]["modelName"] == plugins["token-producer"]["modelName"] == example["model"]
    # The chart names its picker's pods by its release, which docs/deploy/routers.md sets.
    page = (ROOT / "docs" / "deploy" / "routers.md").read_text(encoding="utf-8")
    [release] = re.findall(r"helm install (\S+) oci://ghcr.io/llm-d/charts/llm-d-router-gateway", page)
    peer = {"podSelector": {"matchLabels": {"llm-d-router-gateway": f"{release}-epp"}}}
    assert peer in example["networkPolicy"]["from"]
    assert example["router"]["kvEvents"]["from"] == [peer]
