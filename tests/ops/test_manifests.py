"""The Helm chart: every example renders to objects that Kubernetes' schemas, the policy and Kaon itself accept."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python.chart import lint
from helm_python.errors import HelmError

from engine.config.settings import load_config
from tests.unit.repository.test_kubernetes import OTHERS, drain_of, faults, slept
from tools import manifests
from tools.manifests import BASE, CHART, rendered

pytestmark = pytest.mark.ops

EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "examples").glob("*.yaml"))}
EXAMPLES["defaults"] = {}
VERSIONS = ("1.28", "1.33", "1.37")
"""Kubernetes versions: the oldest that the chart admits, the first with image volumes (feature gate ImageVolume;
enabled by default from 1.35), and the newest with published schemas."""


def shape(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object with these properties and no others."""
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


TEXT, NUMBER, LIST, ANYTHING = {"type": "string"}, {"type": "integer"}, {"type": "array"}, {"type": "object"}
TARGET = shape("name", apiVersion=TEXT, kind=TEXT, name=TEXT)
CREDENTIALS = shape("name", "key", name=TEXT, key=TEXT)
ENDPOINTS = {
    "type": "array",
    "items": shape(
        "port",
        port=TEXT,
        path=TEXT,
        interval={"type": "string", "pattern": r"^\d+(ms|s|m)$"},
        scheme={"enum": ["http", "https"]},
        tlsConfig=shape(serverName=TEXT, ca=shape("secret", secret=shape("name", "key", name=TEXT, key=TEXT))),
        authorization=shape("credentials", credentials=CREDENTIALS, type=TEXT),
    ),
}
MONITOR = {"jobLabel": TEXT, "selector": shape("matchLabels", matchLabels=ANYTHING)}
CUSTOM = {
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": shape(
        "leaderWorkerTemplate",
        replicas=NUMBER,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=shape(
            "workerTemplate",
            size=NUMBER,
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            workerTemplate=ANYTHING,
        ),
    ),
    "inference.networking.k8s.io/v1 InferencePool": shape(
        "selector",
        "targetPorts",
        "endpointPickerRef",
        selector=shape("matchLabels", matchLabels=ANYTHING),
        targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": shape("number", number=NUMBER)},
        endpointPickerRef=shape(
            "name", name=TEXT, port=shape("number", number=NUMBER), failureMode={"enum": ["FailOpen", "FailClose"]}
        ),
    ),
    "keda.sh/v1alpha1 ScaledObject": shape(
        "scaleTargetRef",
        "triggers",
        scaleTargetRef=TARGET,
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        advanced=shape(horizontalPodAutoscalerConfig=shape(behavior=ANYTHING)),
        triggers={
            "type": "array",
            "items": shape(
                "type",
                "metadata",
                type=TEXT,
                name=TEXT,
                metadata=shape(
                    "serverAddress",
                    "query",
                    "threshold",
                    serverAddress=TEXT,
                    query=TEXT,
                    threshold=TEXT,
                    ignoreNullValues={"enum": ["true", "false"]},
                ),
            ),
        },
    ),
    "monitoring.coreos.com/v1 ServiceMonitor": shape("selector", "endpoints", **MONITOR, endpoints=ENDPOINTS),
    "monitoring.coreos.com/v1 PodMonitor": shape("selector", **MONITOR, podMetricsEndpoints=ENDPOINTS),
    "monitoring.coreos.com/v1 PrometheusRule": shape(
        "groups",
        groups={
            "type": "array",
            "items": shape(
                "name",
                name=TEXT,
                interval=TEXT,
                rules={
                    "type": "array",
                    "items": shape(
                        "expr",
                        expr=TEXT,
                        record=TEXT,
                        alert=TEXT,
                        labels=ANYTHING,
                        annotations=ANYTHING,
                        **{"for": TEXT},
                    ),
                },
            ),
        },
    ),
    "cert-manager.io/v1 Certificate": shape(
        "secretName",
        "issuerRef",
        secretName=TEXT,
        dnsNames=LIST,
        issuerRef=shape("name", group=TEXT, kind=TEXT, name=TEXT),
        privateKey=shape(
            algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]}, size=NUMBER, rotationPolicy={"enum": ["Always", "Never"]}
        ),
    ),
}
"""Schemas of `spec` of the custom resources, by API version and kind, with the fields that the chart uses. Each was
compared with the definition in its project's repository when it was written."""


def objects(values: dict[str, Any], name: str = "kaon") -> dict[str, dict[str, Any]]:
    """A release's objects, by kind and name."""
    found = [each for each in yaml.safe_load_all(rendered(values, name)) if each]
    keyed = {f"{each['kind']}/{each['metadata']['name']}": each for each in found}
    assert len(keyed) == len(found)
    return keyed


def workload(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The pods' template."""
    [work] = (each for each in found.values() if each["kind"] in ("Deployment", "LeaderWorkerSet"))
    spec = work["spec"]
    template: dict[str, Any] = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
    return template


def test_the_base_is_what_the_chart_renders(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, run `make rendered`."""
    assert manifests.main(["--check"]) == 0, capsys.readouterr().err
    assert list(yaml.safe_load_all(BASE.read_text())) == list(yaml.safe_load_all(rendered()))


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_s_lint_finds_nothing(example: str) -> None:
    report = lint(CHART, EXAMPLES[example], strict=True)
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"] if "icon" not in each["error"]] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_every_object_fits_its_schema(example: str, version: str) -> None:
    for name, each in objects(EXAMPLES[example]).items():
        custom = CUSTOM.get(f"{each['apiVersion']} {each['kind']}")
        if custom is not None:
            jsonschema.validate(each["spec"], custom)
        elif not (version == "1.28" and example == "nvidia" and name == "Deployment/kaon"):
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("path", [*OTHERS, BASE.with_name("kaon-two-hosts.yaml")], ids=lambda path: path.stem)
def test_the_other_manifests_fit_kubernetes_schemas(path: Path) -> None:
    for each in yaml.safe_load_all(path.read_text()):
        if each["apiVersion"] in ("v1", "apps/v1", "networking.k8s.io/v1"):
            kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
        pods = [each] if each["kind"] == "RayJob" else []
        for job in pods:
            cluster = job["spec"]["rayClusterSpec"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
                kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A definition's schema as JSON Schema that refuses fields which the API server would drop."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = dict(schema)
    if "properties" in schema:
        found["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
        found.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found[name] = closed(schema[name])
    if schema.get("nullable"):
        found["type"] = [schema["type"], "null"]
    return found


def definitions(path: Path) -> dict[str, dict[str, Any]]:
    """The schemas of CustomResourceDefinitions in a file, in a list, or in a folder's files, by version and kind."""
    found = {}
    for file in sorted(path.rglob("*.yaml")) if path.is_dir() else [path]:
        for part in yaml.load_all(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            for each in (part or {}).get("items", [part or {}]):
                if each.get("kind") == "CustomResourceDefinition":
                    spec = each["spec"]
                    for version in spec["versions"]:
                        key = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
                        schema = closed(version["schema"]["openAPIV3Schema"])
                        schema["properties"] |= {"apiVersion": TEXT, "kind": TEXT, "metadata": ANYTHING}
                        found[key] = schema
    return found


@pytest.mark.skipif("KAON_CRDS" not in os.environ, reason="KAON_CRDS names no CustomResourceDefinitions")
def test_custom_resources_fit_the_definitions_of_a_cluster() -> None:
    """`kubectl get crd -o yaml > FILE` writes those of a cluster, and each project publishes its own."""
    known = definitions(Path(os.environ["KAON_CRDS"]))
    found = [each for values in EXAMPLES.values() for each in objects(values).values()]
    found += [each for path in OTHERS for each in yaml.safe_load_all(path.read_text())]
    custom = [each for each in found if f"{each['apiVersion']} {each['kind']}" in known]
    assert custom, f"none of the chart's kinds is among {sorted(known)}"
    for each in custom:
        # Unchecked: patterns are Go's, a few of which are not valid in Python.
        validator = jsonschema.Draft202012Validator(known[f"{each['apiVersion']} {each['kind']}"])
        validator.validate(each)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**each, "spec": {**each["spec"], "fieldThatDoesNotExist": 1}})
    compared = sorted({f"{each['apiVersion']} {each['kind']}" for each in custom})
    sys.stdout.write("\n".join(compared))


@pytest.mark.parametrize("field", ["replicaz: 1", "replicas: many"])
def test_a_field_that_does_not_exist_is_found(field: str) -> None:
    deployment = objects({})["Deployment/kaon"]
    deployment["spec"] |= yaml.safe_load(field)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_meets_the_policy(example: str) -> None:
    assert faults(objects(EXAMPLES[example])) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_arguments_are_kaon_s_and_the_parts_fit_together(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects(EXAMPLES[example])
    template = workload(found)
    [box] = template["spec"]["containers"]
    variables = {"POD_IP": "10.0.0.7", "LWS_LEADER_ADDRESS": "kaon-0.kaon"}
    for variable in box["env"]:
        if variable["name"].startswith("KAON_") and "CLUSTER_KEY" not in variable["name"]:
            given = {"KAON_NODE_RANK": "0", "KAON_API_KEY": "a-key-of-an-api-client"}.get(variable["name"], "")
            monkeypatch.setenv(variable["name"], variable.get("value", given))
    command, *arguments = (re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], each) for each in box["args"])
    assert command == "serve"
    config = load_config(arguments)
    assert config.server_config.host == "0.0.0.0"
    assert config.server_config.port == next(port["containerPort"] for port in box["ports"] if port["name"] == "http")
    assert template["spec"]["terminationGracePeriodSeconds"] > config.server_config.drain_timeout
    mounts = {mount["name"] for mount in box["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}
    labels = {**template["metadata"]["labels"], "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert found["Service/kaon"]["spec"]["selector"].items() <= labels.items()
    for volume in template["spec"]["volumes"]:
        if claim := volume.get("persistentVolumeClaim"):
            assert f"PersistentVolumeClaim/{claim['claimName']}" in found
    if pool := found.get("InferencePool/kaon"):
        assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert pool["spec"]["targetPorts"] == [{"number": config.server_config.port}]
    for monitor in (each for each in found.values() if each["kind"].endswith("Monitor")):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert labels[monitor["spec"]["jobLabel"]] == "kaon"  # The metrics that the alert rules use.
        if selected := EXAMPLES[example]["monitoring"].get("labels"):
            assert selected.items() <= monitor["metadata"]["labels"].items()
    for scaler in (each for each in found.values() if each["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")):
        target = scaler["spec"]["scaleTargetRef"]
        assert f"{target['kind']}/{target['name']}" in found
        assert "replicas" not in found[f"{target['kind']}/{target['name']}"]["spec"]
        asked = re.findall(r"kaon_\w+", str(scaler["spec"]))
        assert set(asked) == {"kaon_requests_waiting", "kaon_kv_cache_usage_ratio"}


def test_two_releases_in_a_namespace_share_no_name_and_no_pod() -> None:
    first, second = objects(EXAMPLES["amd"], "kaon"), objects(EXAMPLES["amd"], "small")
    assert first.keys() & second.keys() == set()
    assert first["Service/kaon"]["spec"]["selector"] != second["Service/small-kaon"]["spec"]["selector"]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"replicaz": 2}, "replicaz"),
        ({"resources": {"limits": {"memory": None}}}, "memory"),
        ({"accelerator": {"type": "tpu"}}, "accelerator"),
        ({"router": {"kvEvents": {"enabled": True}}}, "the peers that may read prompts"),
        ({"monitoring": {"kind": "pod"}}, "needs a key"),
        ({"download": {"enabled": True}}, "needs a model"),
        ({"tls": {"enabled": True}}, "tls.hosts"),
        ({"modelVolume": {"kind": "image"}}, "modelVolume.image"),
        ({"apiKeys": {"create": True}}, "apiKeys.values"),
        ({"podDisruptionBudget": {"enabled": True}}, "no node could ever be drained"),
        (
            {
                "podDisruptionBudget": {"enabled": True, "minAvailable": 4},
                "replicas": 2,
                "multiHost": {"enabled": True},
            },
            "is 4 of 4 pods",
        ),
        ({"modelVolume": {"kind": "claim"}, "replicas": 2}, "set it to ReadWriteMany"),
        ({"modelVolume": {"kind": "claim"}, "autoscaling": {"kind": "hpa"}}, "set it to ReadWriteMany"),
        ({"modelVolume": {"kind": "claim"}, "multiHost": {"enabled": True}}, "set it to ReadWriteMany"),
        ({"autoscaling": {"kind": "keda"}}, "monitoring.kind service or pod"),
        ({"podDisruptionBudget": {"enabled": True, "minAvailable": "100%"}, "replicas": 3}, "is 3 of 3 pods"),
        ({"podDisruptionBudget": {"enabled": True, "minAvailable": "60%"}, "replicas": 2}, "is 2 of 2 pods"),
        ({"podDisruptionBudget": {"enabled": True, "minAvailable": "2"}, "replicas": 3}, "minAvailable"),
        ({"podLabels": {"app": "mine"}}, "podLabels"),
        ({"settings": {"port": 9000}}, "settings.port is the chart's own: set service.port in its place"),
        ({"settings": {"drain_timeout": 300}}, "settings.drain_timeout is the chart's own: set drainSeconds"),
        ({"settings": {"host": "127.0.0.1"}}, "settings.host"),
        ({"service": {"annotations": {"a": True}}}, "annotations"),
    ],
)
def test_values_that_do_not_fit_are_refused_in_words(values: dict[str, Any], why: str) -> None:
    with pytest.raises(HelmError, match=re.escape(why)):
        rendered(values)


def test_a_service_has_its_annotations_and_pods_their_account() -> None:
    service = {"type": "LoadBalancer", "annotations": {"a/b": "true"}}
    found = objects({"service": service, "serviceAccountName": "kaon"})
    assert found["Service/kaon"]["metadata"]["annotations"] == {"a/b": "true"}
    spec = workload(found)["spec"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("kaon", False)
    assert faults(found) == []


def test_the_download_runs_the_command_that_there_is() -> None:
    [box] = workload(objects(EXAMPLES["amd"]))["spec"]["initContainers"]
    assert box["args"] == ["pull", "Qwen/Qwen3-32B"]
    assert {mount["mountPath"] for mount in box["volumeMounts"]} == {"/var/cache/kaon", "/tmp"}


def test_the_multi_host_s_pods_outlast_the_first_one_s_drain() -> None:
    spec = workload(objects(EXAMPLES["multi-host"]))["spec"]
    shell = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert slept(shell, 0) + 30 < slept(shell, 1) < spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_pod_that_ends_is_off_the_lists_first_and_has_the_time_to_answer(
    example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = objects({**EXAMPLES[example], "drainSeconds": 120})
    spec = workload(found)["spec"]
    [box] = spec["containers"]
    command = box["lifecycle"]["preStop"]["exec"]["command"]
    before = int(command[1]) if command[0] == "sleep" else slept(command, 0)
    monkeypatch.setenv("KAON_API_KEY", "a-key-of-an-api-client")
    drain = drain_of([each for each in box["args"][1:] if each.startswith(("--host", "--drain"))])
    assert before >= 5
    assert drain == 120
    assert before + drain + 10 <= spec["terminationGracePeriodSeconds"]


def test_nothing_has_the_name_of_the_service_by_which_pods_of_a_group_find_each_other() -> None:
    """If there is no Service of the workload's name, the controller creates a headless one."""
    found = objects(EXAMPLES["multi-host"])
    [group] = (each["metadata"]["name"] for each in found.values() if each["kind"] == "LeaderWorkerSet")
    assert f"Service/{group}" not in found
    assert "Service/kaon" in found


def test_monitors_and_services_see_pods_that_serve() -> None:
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    monitoring = {"kind": "pod", "keySecret": {"name": "metrics", "key": "key"}}
    found = objects({**EXAMPLES["multi-host"], "monitoring": monitoring})
    assert found["PodMonitor/kaon"]["spec"]["selector"]["matchLabels"][index] == "0"
    assert found["Service/kaon"]["spec"]["selector"][index] == "0"
    service = objects({**EXAMPLES["multi-host"], "monitoring": {**monitoring, "kind": "service"}})
    # It selects labels of Services, not of pods.
    assert service["ServiceMonitor/kaon"]["spec"]["selector"] == {"matchLabels": {"app": "kaon"}}


def test_who_scrapes_and_who_picks_reach_the_port_where_peers_are_named() -> None:
    found = objects(EXAMPLES["production"])
    rules = found["NetworkPolicy/kaon"]["spec"]["ingress"]
    [peers] = (rule["from"] for rule in rules if rule["ports"] == [{"port": "http"}])
    namespaces = {str(peer["namespaceSelector"]["matchLabels"]) for peer in peers if "namespaceSelector" in peer}
    address = EXAMPLES["production"]["autoscaling"].get("prometheus", "http://prometheus-operated.monitoring.svc:9090")
    assert any(f"'{address.split('.')[1]}'" in each for each in namespaces)
    assert EXAMPLES["production"]["router"]["kvEvents"]["from"][0] in peers


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector:4318", 4318),
        ("http://collector-2", 80),
        ("https://collector.example/otlp", 443),
        ("http://10.0.0.5", 80),
        ("http://[fd00::5]:4318/", 4318),
    ],
)
def test_the_collector_s_port_is_open(endpoint: str, port: int) -> None:
    rules = objects({"otlpEndpoint": endpoint, "networkPolicy": {"hub": False}})["NetworkPolicy/kaon"]["spec"]
    assert [each["ports"] for each in rules["egress"][1:]] == [[{"port": port}]]


def test_ports_of_events_are_open_for_each_replica_of_a_pod() -> None:
    router = {"kvEvents": {"enabled": True, "from": [{"podSelector": {}}]}}
    found = objects({"router": router, "settings": {"data_parallel_size": 4}})
    [rule] = (each for each in found["NetworkPolicy/kaon"]["spec"]["ingress"] if "from" in each)
    assert rule["ports"] == [{"port": 5557, "endPort": 5560}, {"port": 5657, "endPort": 5660}]


def test_keys_may_be_a_file_that_changes_without_a_restart() -> None:
    spec = workload(objects({"apiKeys": {"asFile": True}}))["spec"]
    [box] = spec["containers"]
    variables = {each["name"]: each.get("value") for each in box["env"]}
    assert variables == {"KAON_API_KEY_FILE": "/etc/kaon/keys/keys"}
    [mount] = (each for each in box["volumeMounts"] if each["mountPath"] == "/etc/kaon/keys")
    assert mount["readOnly"]
    [volume] = (each["secret"] for each in spec["volumes"] if each["name"] == mount["name"])
    assert volume == {"secretName": "kaon-api-keys", "defaultMode": 0o440}


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        ({}, None),
        ({"modelVolume": {"kind": "claim"}}, {"type": "Recreate"}),
        ({"modelVolume": {"kind": "claim", "accessMode": "ReadWriteMany"}}, None),
        ({"accelerator": {"type": "amd"}}, {"type": "Recreate"}),
        ({"accelerator": {"type": "amd"}, "replicas": 3}, {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}),
    ],
)
def test_an_upgrade_needs_no_second_device_and_no_second_mount(values: dict[str, Any], strategy: Any) -> None:
    assert objects(values)["Deployment/kaon"]["spec"].get("strategy") == strategy


def test_a_budget_may_be_a_percentage() -> None:
    found = objects({"podDisruptionBudget": {"enabled": True, "minAvailable": "50%"}, "replicas": 2})
    assert found["PodDisruptionBudget/kaon"]["spec"]["minAvailable"] == "50%"


def test_a_rollout_has_not_failed_while_a_model_may_still_load() -> None:
    spec = objects({"startupSeconds": 3600})["Deployment/kaon"]["spec"]
    [box] = spec["template"]["spec"]["containers"]
    probe = box["startupProbe"]
    assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"] >= 3600


def alerts(values: dict[str, Any], name: str = "kaon") -> dict[str, dict[str, Any]]:
    """The alert rules of a release, by name."""
    monitoring = {"kind": "pod", "rules": True, "keySecret": {"name": "metrics", "key": "key"}}
    [rules] = (
        each
        for each in objects({"monitoring": monitoring, **values}, name).values()
        if each["kind"] == "PrometheusRule"
    )
    jsonschema.validate(rules["spec"], CUSTOM["monitoring.coreos.com/v1 PrometheusRule"])
    return {rule["alert"]: rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule}


@pytest.mark.parametrize(("startup", "waits"), [(60, "600s"), (3600, "3600s")])
def test_no_engine_that_still_loads_raises_an_alert(startup: int, waits: str) -> None:
    assert alerts({"startupSeconds": startup})["KaonEngineNotServing"]["for"] == waits


def test_a_release_of_which_nothing_is_scraped_raises_an_alert() -> None:
    assert alerts({}, "small")["KaonAbsent"]["expr"] == 'absent(up{namespace="default",job="small-kaon"})'
    # Without a monitor the job name under which Prometheus scrapes the pods is unknown.
    assert "KaonAbsent" not in alerts({"monitoring": {"rules": True}})


def test_alerts_link_to_where_the_runbooks_are_served() -> None:
    rules = {"kind": "pod", "rules": True, "keySecret": {"name": "metrics", "key": "key"}}
    found = alerts({"monitoring": {**rules, "runbooks": "https://docs.example/runbooks.html"}})
    links = {name: rule["annotations"]["runbook_url"] for name, rule in found.items()}
    assert links == {name: f"https://docs.example/runbooks.html#{name.lower()}" for name in found}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "kaon-demo"),
        ({"model": "Qwen/Qwen3-8B"}, "Qwen/Qwen3-8B"),
        ({"modelVolume": {"kind": "image", "image": "registry.example/model"}}, "/models"),
        ({"model": "Qwen/Qwen3-8B", "settings": {"served_model_name": ["small", "qwen"]}}, "small"),
        ({"settings": {"served_model_name": "small,qwen"}}, "small"),
    ],
)
def test_the_topic_of_events_ends_with_the_served_name(
    values: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = {"kvEvents": {"enabled": True, "from": [{"podSelector": {}}]}}
    [box] = workload(objects({**values, "router": router}))["spec"]["containers"]
    monkeypatch.setenv("KAON_API_KEY", "a-key-of-an-api-client")
    config = load_config(box["args"][1:])
    assert config.kv_events_config.kv_events_topic.split("@")[-1] == name == config.model_names[0]


def test_lists_of_settings_are_text_whatever_they_hold() -> None:
    [box] = workload(objects({"settings": {"stop": ["a: b", " # c", "{d"]}}))["spec"]["containers"]
    assert box["args"][-1] == "--stop=a: b, # c,{d"


@pytest.mark.parametrize(("is_file", "text"), [(False, "first-key-of-two-xx,second-key-of-two-x"), (True, None)])
def test_the_secret_has_keys_as_they_are_read(is_file: bool, text: str | None) -> None:
    keys = ["first-key-of-two-xx", "second-key-of-two-x"]
    found = objects({"apiKeys": {"create": True, "asFile": is_file, "values": keys}})
    written = found["Secret/kaon-api-keys"]["stringData"]["keys"]
    assert written == (text or "\n".join(keys))


@pytest.mark.parametrize("name", ["a" * 53, "b" * 44 + "-" + "c" * 8])
def test_a_long_release_name_keeps_the_ending_that_the_alert_rules_know(name: str) -> None:
    [service] = (each for each in objects({}, name).values() if each["kind"] == "Service")
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", service["metadata"]["name"])
    assert re.fullmatch(r"(.+-)?kaon", service["metadata"]["name"])


def test_a_query_without_samples_scales_nothing_down() -> None:
    found = objects(
        {
            "autoscaling": {"kind": "keda"},
            "monitoring": {"kind": "pod", "keySecret": {"name": "metrics", "key": "key"}},
        }
    )
    triggers = found["ScaledObject/kaon"]["spec"]["triggers"]
    assert [each["metadata"]["ignoreNullValues"] for each in triggers] == ["false", "false"]
