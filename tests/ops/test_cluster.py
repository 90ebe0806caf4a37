"""Every manifest of deploy/ against the API server of a cluster: errors that Kubernetes' schemas alone do not find.

`KAON_KUBECONFIG` names a kubeconfig whose current context may create namespaces. With `KAON_CRDS`, a file or folder of
CustomResourceDefinitions, those that the cluster lacks are installed, and removed at the end. No node is needed: the
tests do not wait for pods.
"""

import base64
import os
import secrets
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.kaon_server import eventually
from tests.ops.test_manifests import EXAMPLES, objects
from tests.unit.repository.test_kubernetes import OTHERS, templates
from tools.manifests import BASE

pytestmark = [
    pytest.mark.ops,
    pytest.mark.skipif(
        "KAON_KUBECONFIG" not in os.environ,
        reason="KAON_KUBECONFIG names no cluster: KAON_KUBECONFIG=~/.kube/config make test-ops "
        "ARGS=tests/ops/test_cluster.py applies every manifest in namespaces that it makes and deletes",
    ),
]

RELEASES = {
    **{example: lambda values=values: objects(values) for example, values in EXAMPLES.items()},
    **{
        path.stem: lambda path=path: dict(enumerate(yaml.safe_load_all(path.read_text())))
        for path in (BASE, BASE.with_name("kaon-two-hosts.yaml"), *OTHERS)
    },
}
NOT_OF_PODS = ("annotations", "supportedModelFormats", "protocolVersions", "multiModel", "runtimeClassName")
APPLY = {"Content-Type": "application/apply-patch+yaml"}


class Cluster:
    """The API server of a kubeconfig's current context, with a client's certificate or a token."""

    def __init__(self, path: Path) -> None:
        config = yaml.safe_load(path.read_text())
        context = self._named(config["contexts"], config["current-context"])["context"]
        server = self._named(config["clusters"], context["cluster"])["cluster"]
        user = self._named(config["users"], context["user"])["user"]
        authority = self._content(server, "certificate-authority", path)
        verify = ssl.create_default_context(cadata=authority.decode() if authority else None)
        if server.get("insecure-skip-tls-verify"):
            verify.check_hostname, verify.verify_mode = False, ssl.CERT_NONE
        if certificate := self._content(user, "client-certificate", path):
            # The ssl module reads certificates from files only.
            pair = path.with_name(f"{path.name}.{secrets.token_hex(4)}.pem")
            pair.touch(0o600)
            try:
                pair.write_bytes(certificate + b"\n" + (self._content(user, "client-key", path) or b""))
                verify.load_cert_chain(pair)
            finally:
                pair.unlink()
        headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        self.client = httpx.Client(base_url=server["server"], headers=headers, verify=verify, timeout=60)

    @staticmethod
    def _named(listed: list[dict[str, Any]], name: str) -> dict[str, Any]:
        return next(each for each in listed if each["name"] == name)

    @staticmethod
    def _content(holder: dict[str, Any], field: str, path: Path) -> bytes | None:
        """A value that a kubeconfig has inline, or in a file whose path is relative to it."""
        if f"{field}-data" in holder:
            return base64.b64decode(holder[f"{field}-data"])
        return (path.parent / holder[field]).read_bytes() if field in holder else None

    def resource(self, each: dict[str, Any]) -> dict[str, Any] | None:
        """The server's resource for an object's version and kind."""
        version = each["apiVersion"]
        answer = self.client.get(f"/apis/{version}" if "/" in version else f"/api/{version}")
        if answer.status_code == 404:
            return None
        found = [known for known in answer.json()["resources"] if "/" not in known["name"]]
        return next((known for known in found if known["kind"] == each["kind"]), None)

    def apply(self, each: dict[str, Any], namespace: str | None = None, **parameters: str) -> httpx.Response:
        """Apply an object on the server's side, where an unknown field is an error."""
        resource = self.resource(each)
        assert resource is not None, f"the cluster has no {each['apiVersion']} {each['kind']}"
        version = each["apiVersion"]
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if resource["namespaced"]:
            path += f"/namespaces/{namespace}"
        parameters = {"fieldManager": "kaon-tests", "fieldValidation": "Strict", **parameters}
        url = f"{path}/{resource['name']}/{each['metadata']['name']}"
        return self.client.patch(url, params=parameters, headers=APPLY, content=yaml.safe_dump(each))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The cluster, with the definitions of `KAON_CRDS` installed while the module runs."""
    found = Cluster(Path(os.environ["KAON_KUBECONFIG"]).expanduser())
    installed: list[str] = []
    try:
        for definition in _definitions():
            url = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}"
            if found.client.get(url).status_code == 404:
                installed.append(url)
                # The projects' repositories contain fields of generators, which are not part of definitions.
                answer = found.apply(definition, fieldValidation="Ignore")
                assert answer.is_success, answer.text
                eventually(lambda url=url: _is_served(found.client.get(url).json()))  # type: ignore[misc]
        yield found
    finally:
        for url in installed:
            found.client.delete(url)


def _is_served(definition: dict[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or []
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)


def _definitions() -> list[dict[str, Any]]:
    path = Path(os.environ["KAON_CRDS"]) if "KAON_CRDS" in os.environ else None
    files = [] if path is None else sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    parts = [part or {} for file in files for part in yaml.load_all(file.read_text(), Loader=loader)]
    found = [each for part in parts for each in part.get("items", [part])]
    return [each for each in found if each.get("kind") == "CustomResourceDefinition"]


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace that admits pods of the Pod Security profile `restricted` alone."""
    name = f"kaon-test-{secrets.token_hex(4)}"
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    metadata = {"name": name, "labels": labels}
    made = cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    assert made.status_code == 201, made.text
    # Without a service account no pod is admitted; a controller creates it too, later.
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    assert cluster.apply(account, name).is_success
    yield name
    assert cluster.client.delete(f"/api/v1/namespaces/{name}").is_success


def refused(answer: httpx.Response) -> list[str]:
    """The reason why the server does not accept an object unchanged: its error and its warnings."""
    errors = [] if answer.is_success else [answer.json()["message"]]
    return errors + answer.headers.get_list("warning")


@pytest.mark.parametrize("release", RELEASES)
def test_the_api_server_accepts_every_object(release: str, cluster: Cluster, namespace: str) -> None:
    found = list(RELEASES[release]().values())
    known = [each for each in found if cluster.resource(each) is not None]
    unknown = sorted({f"{each['apiVersion']} {each['kind']}" for each in found if each not in known})
    if not known:
        pytest.skip(f"the cluster has no {' and no '.join(unknown)}: KAON_CRDS names files with their definitions")
    assert all(cluster.resource(each)["namespaced"] for each in known)  # type: ignore[index]
    for dry in ({"dryRun": "All"}, {}):
        faults = {each["kind"]: why for each in known if (why := refused(cluster.apply(each, namespace, **dry)))}
        assert faults == {}
    sys.stdout.write(f"{release}: {len(known)} objects accepted; unknown to the cluster: {unknown or 'none'}\n")


@pytest.mark.parametrize("release", RELEASES)
def test_the_api_server_admits_the_pods(release: str, cluster: Cluster, namespace: str) -> None:
    """A workload may be accepted although its controller's pods are refused."""
    for number, template in enumerate(templates(RELEASES[release]())):
        # A ServingRuntime has fields of a pod and its own; a RuntimeClass is installed by the GPUs' operator.
        spec = {name: each for name, each in template["spec"].items() if name not in NOT_OF_PODS}
        metadata = {**template.get("metadata", {}), "name": f"pod-{number}"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        assert refused(cluster.apply(pod, namespace, dryRun="All")) == []


def test_a_field_that_does_not_exist_is_refused(cluster: Cluster, namespace: str) -> None:
    deployment = objects({})["Deployment/kaon"]
    deployment["spec"]["replicaz"] = 1
    answer = cluster.apply(deployment, namespace, dryRun="All")
    assert any("replicaz" in why for why in refused(answer))


def test_a_pod_of_root_is_refused(cluster: Cluster, namespace: str) -> None:
    container = {"name": "a", "image": "kaon"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [container]}}
    assert "restricted" in refused(cluster.apply(pod, namespace, dryRun="All"))[0]
