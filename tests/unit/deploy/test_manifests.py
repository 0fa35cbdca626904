"""The Kubernetes manifests: schema, cross-checks, and that every kind of mistake would be noticed."""

import copy
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from shared import keys
from tests.unit.deploy import checks
from tests.unit.deploy.checks import Object

ROOT = Path(__file__).resolve().parents[3]
OVERLAYS = sorted(path.parent.name for path in ROOT.glob("k8s/overlays/*/kustomization.yaml"))
NO_SCHEMA = ("ServiceMonitor", "PrometheusRule")  # of the Prometheus operator

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl, which renders the overlays offline")


@cache
def rendered(overlay: str) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", ROOT / "k8s/overlays" / overlay], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(overlay: str) -> list[Object]:
    return checks.load(rendered(overlay))


def test_overlays_are_all_there() -> None:
    assert OVERLAYS == ["cpu-demo", "gpu", "s3", "s3-node-cache", "tp"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_schema(overlay: str) -> None:
    for each in objects(overlay):
        if each["kind"] not in NO_SCHEMA:
            kubernetes_validate.validate(each, "1.33", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_at_odds(overlay: str) -> None:
    assert checks.faults(objects(overlay)) == []


def sound(folder: Path, kustomization: str) -> list[Object]:
    """The objects of an overlay that somebody may write."""
    (folder / "kustomization.yaml").write_text(kustomization)
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = checks.load(done.stdout)
    for each in found:
        if each["kind"] not in NO_SCHEMA:
            kubernetes_validate.validate(each, "1.33", strict=True)
    assert checks.faults(found) == []
    return found


@pytest.mark.parametrize("overlay", ["gpu", "s3"])
def test_the_options(overlay: str, tmp_path: Path) -> None:
    options = ("deletion-cost", "tenants", "tls")
    base, *components = (
        os.path.relpath(ROOT / "k8s" / part, tmp_path)
        for part in (f"overlays/{overlay}", *(f"components/{option}" for option in options))
    )
    found = sound(tmp_path, f"namespace: quire\nresources: [{base}]\ncomponents: [{', '.join(components)}]\n")
    environment = {item["name"]: item.get("value") for item in container(found, "gateway")["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container(found, "gateway")["volumeMounts"]}
    assert environment["QUIRE_API_KEY_FILE"] == f"{mounts['tenants']}/tenants.toml"
    assert environment["QUIRE_TLS_CERT"] == f"{mounts['tls']}/tls.crt"
    assert environment["QUIRE_TLS_KEY"] == f"{mounts['tls']}/tls.key"
    assert spec(found, "Service", "gateway")["ports"][0]["port"] == 443
    binding = checks.named(found, "RoleBinding", "quire-deletion-cost")
    assert binding and binding["subjects"][0]["namespace"] == "quire"


def test_what_the_overlays_are_for() -> None:
    def worker(overlay: str) -> Any:
        deployment = checks.named(objects(overlay), "Deployment", "quire-worker")
        assert deployment
        return deployment["spec"]["template"]["spec"]

    assert worker("gpu")["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    tp = worker("tp")["containers"][0]
    assert tp["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert {"name": "QUIRE_TENSOR_PARALLEL_SIZE", "value": "4"} in tp["env"]
    assert "nvidia.com/gpu" not in worker("cpu-demo")["containers"][0]["resources"]["limits"]
    assert worker("cpu-demo")["containers"][0]["image"].endswith("-cpu")
    assert worker("s3")["initContainers"][0]["command"][-1] == "/models/served"
    assert not checks.named(objects("s3"), "PersistentVolumeClaim", "quire-models")
    assert any("hostPath" in volume for volume in worker("s3-node-cache")["volumes"])


def test_inner_ports_are_closed_to_all_but_our_pods() -> None:
    for overlay in OVERLAYS:
        policies = [each for each in objects(overlay) if each["kind"] == "NetworkPolicy"]
        assert any(not each["spec"].get("ingress") and "Ingress" in each["spec"]["policyTypes"] for each in policies)
        open_ports = set()
        for each in policies:
            for rule in each["spec"].get("ingress", []):
                for port in rule["ports"]:
                    if "from" not in rule:
                        open_ports.add(port["port"])
        assert open_ports == {"http"}


Change = Callable[[list[Object]], None]


def deployment(found: list[Object], name: str) -> Any:
    each = checks.named(found, "Deployment", f"quire-{name}")
    assert each
    return each["spec"]


def pod(found: list[Object], name: str) -> Any:
    return deployment(found, name)["template"]["spec"]


def container(found: list[Object], name: str) -> Any:
    return pod(found, name)["containers"][0]


def spec(found: list[Object], kind: str, name: str) -> Any:
    each = checks.named(found, kind, f"quire-{name}")
    assert each
    return each["spec"]


def drop(holder: Any, key: str) -> None:
    del holder[key]


MISTAKES: dict[str, tuple[Change, str]] = {
    "selector": (lambda o: deployment(o, "worker")["selector"]["matchLabels"].update(x="y"), "does not match its own pods"),
    "service selector": (lambda o: spec(o, "Service", "gateway").update(selector={"app": "gateway"}), "selects no pod"),
    "budget selector": (
        lambda o: spec(o, "PodDisruptionBudget", "worker")["selector"]["matchLabels"].update(x="y"),
        "selects no pod",
    ),
    "healthy budget": (
        lambda o: drop(spec(o, "PodDisruptionBudget", "worker"), "unhealthyPodEvictionPolicy"),
        "no node could be drained",
    ),
    "policy peer": (
        lambda o: spec(o, "NetworkPolicy", "scheduler")["ingress"][0]["from"][0]["podSelector"]["matchLabels"].update(x="y"),
        "selects no pod",
    ),
    "policy port": (
        lambda o: spec(o, "NetworkPolicy", "scheduler")["ingress"][0]["ports"][0].update(port="gateway"),
        "lets traffic in to port gateway",
    ),
    "monitor port": (
        lambda o: next(e for e in o if e["kind"] == "ServiceMonitor")["spec"]["endpoints"][0].update(port="web"),
        "no service has a port named web",
    ),
    "monitor of the clients' port": (
        lambda o: next(e for e in o if e["kind"] == "ServiceMonitor")["spec"]["endpoints"][0].update(port="http"),
        "scrapes http, which may want a key or TLS",
    ),
    "probe of the clients' port": (
        lambda o: container(o, "gateway")["livenessProbe"]["httpGet"].update(port="http"),
        "livenessProbe asks for /health on http",
    ),
    "probe path": (
        lambda o: container(o, "scheduler")["readinessProbe"]["httpGet"].update(path="/ready"),
        "readinessProbe asks for /ready on metrics",
    ),
    "name of the model": (
        lambda o: container(o, "gateway")["env"][1]["valueFrom"]["configMapKeyRef"].update(key="NAME"),
        "QUIRE_SERVED_MODEL_NAME is to come from NAME",
    ),
    "port name": (lambda o: container(o, "worker")["ports"][0].update(name="metrics_of_worker"), "is not allowed"),
    "port number": (lambda o: container(o, "scheduler")["ports"][0].update(containerPort=5710), "does not listen on 5710"),
    "probe port": (lambda o: container(o, "gateway")["readinessProbe"]["httpGet"].update(port="web"), "names no port"),
    "target port": (lambda o: spec(o, "Service", "gateway")["ports"][0].update(targetPort="web"), "no pod has port web"),
    "mount": (lambda o: container(o, "worker")["volumeMounts"][0].update(name="key"), "mounts key, which is no volume"),
    "unused volume": (lambda o: container(o, "worker")["volumeMounts"].pop(0), "volume keys is not mounted"),
    "claim": (
        lambda o: pod(o, "worker")["volumes"][1]["persistentVolumeClaim"].update(claimName="models"),
        "there is no claim models",
    ),
    "secret": (lambda o: pod(o, "worker")["volumes"][0]["secret"].update(secretName="keys"), "there is no secret keys"),
    "config map": (
        lambda o: container(o, "worker")["envFrom"][0]["configMapRef"].update(name="quire-config"),
        "there is no config map",
    ),
    "quantity": (lambda o: container(o, "worker")["resources"]["limits"].update(memory="32GB"), "is no quantity"),
    "half a GPU": (
        lambda o: container(o, "worker")["resources"]["limits"].update({"nvidia.com/gpu": "0.5"}),
        "must be a whole number",
    ),
    "no limit": (lambda o: drop(container(o, "gateway")["resources"], "limits"), "lacks a memory limit"),
    "scaled thing": (
        lambda o: spec(o, "HorizontalPodAutoscaler", "worker")["scaleTargetRef"].update(name="worker"),
        "target does not exist",
    ),
    "scale limits": (lambda o: spec(o, "HorizontalPodAutoscaler", "worker").update(maxReplicas=0), "do not fit"),
    "fixed replicas": (lambda o: deployment(o, "worker").update(replicas=3), "also fixes replicas"),
    "described object": (
        lambda o: spec(o, "HorizontalPodAutoscaler", "worker")["metrics"][0]["object"]["describedObject"].update(name="x"),
        "there is no Service x",
    ),
    "root": (lambda o: drop(pod(o, "gateway")["securityContext"], "runAsNonRoot"), "may run as root"),
    "seccomp": (lambda o: drop(pod(o, "gateway")["securityContext"], "seccompProfile"), "no seccomp profile"),
    "token": (lambda o: drop(pod(o, "worker"), "automountServiceAccountToken"), "service account token"),
    "service links": (lambda o: drop(pod(o, "worker"), "enableServiceLinks"), "unknown setting"),
    "host network": (lambda o: pod(o, "worker").update(hostNetwork=True), "host's namespaces"),
    "host path": (lambda o: pod(o, "worker")["volumes"][3].update(hostPath={"path": "/"}), "hostPath volume in a restricted"),
    "capabilities": (lambda o: drop(container(o, "worker")["securityContext"], "capabilities"), "may gain privileges"),
    "writable root": (
        lambda o: container(o, "worker")["securityContext"].update(readOnlyRootFilesystem=False),
        "may write to its root",
    ),
    "latest": (lambda o: container(o, "worker").update(image="quire-worker:latest"), "is no fixed version"),
    "unknown setting": (
        lambda o: container(o, "worker")["env"].append({"name": "QUIRE_MAX_LEN", "value": "1"}),
        "would refuse its settings",
    ),
    "bad value": (
        lambda o: container(o, "worker")["env"].append({"name": "QUIRE_BLOCK_SIZE", "value": "17"}),
        "must be 16, 32 or 64",
    ),
    "wrong address": (
        lambda o: container(o, "worker")["env"][1].update(value="tcp://quire-scheduler:5713"),
        "which no service offers",
    ),
    "no drain": (lambda o: drop(container(o, "gateway"), "lifecycle"), "has no preStop"),
    "ready too early": (
        lambda o: container(o, "worker")["readinessProbe"]["httpGet"].update(path="/metrics"),
        "counts as ready before it gets work",
    ),
    "short grace": (lambda o: drop(pod(o, "worker"), "terminationGracePeriodSeconds"), "too little time to drain"),
    "short start": (lambda o: container(o, "worker")["startupProbe"].update(failureThreshold=10), "too little time to load"),
    "impatient rollout": (
        lambda o: drop(deployment(o, "worker"), "progressDeadlineSeconds"),
        "counts as failed after 600 s, while a worker may load for 1800 s",
    ),
    "two schedulers": (lambda o: deployment(o, "scheduler").update(replicas=2), "must be one"),
    "rolling scheduler": (lambda o: drop(deployment(o, "scheduler"), "strategy"), "must be one"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    change, expected = MISTAKES[mistake]
    found = copy.deepcopy(objects("gpu"))
    change(found)
    noticed = checks.faults(found)
    assert any(expected in fault for fault in noticed), noticed


def test_the_schema_check_notices_a_misspelt_field() -> None:
    found = objects("gpu")
    container(found, "worker")["readynessProbe"] = {}
    each = checks.named(found, "Deployment", "quire-worker")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(each, "1.33", strict=True)


def readme_blocks(pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / "k8s/README.md").read_text(), flags=re.MULTILINE)


def test_the_overlay_of_the_readme(tmp_path: Path) -> None:
    (text,) = readme_blocks(r"^```yaml\n((?s:.*?))^```")
    place = ROOT / "k8s/overlays/own"
    there = re.sub(r"\.\./[\w./-]+", lambda path: os.path.relpath(place / path[0], tmp_path), text)
    found = sound(tmp_path, there)
    name = container(found, "gateway")["env"][1]["valueFrom"]["configMapKeyRef"]["name"]
    model = checks.named(found, "ConfigMap", name)
    assert model and model["data"] == {"QUIRE_MODEL": "Qwen/Qwen3-8B", "QUIRE_SERVED_MODEL_NAME": "qwen3-8b"}
    assert container(found, "worker")["image"] == "registry.example.com/quire-worker:0.1.0"
    assert spec(found, "PersistentVolumeClaim", "models")["storageClassName"] == "nfs"
    watched = [checks.named(found, kind, "quire") for kind in NO_SCHEMA]
    assert all(each and "release" in each["metadata"]["labels"] for each in watched)


def test_the_key_rotation_of_the_readme(tmp_path: Path) -> None:
    """Its lines, with kubectl and docker played: at every change of the secret the scheduler admits who has a key then."""
    lines = next(block for block in readme_blocks(r"((?:^    .*\n)+)") if "gateway-old" in block)
    here = f'python() {{ {sys.executable} "${{@/#\\/keys/$PWD/keys}}"; }}'
    lines = re.sub(r"python\(\) .*", lambda _: here, lines)
    played = """
        sleep() { true; }
        docker() { false; }
        kubectl() {
            test "$3" = create || return 0
            local role=${6#quire-keys-} made
            made=$(find . -maxdepth 1 -name "seen-$role-*" | wc -l)
            cp -r "keys/split/$role" "seen-$role-$made"
        }
    """
    keys.main([str(tmp_path / "keys"), str(tmp_path / "keys/split")])
    old = (tmp_path / "keys/gateway.public").read_bytes().strip()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        ["bash", "-euc", f"{textwrap.dedent(played)}\n{textwrap.dedent(lines)}"], cwd=tmp_path, env=environment, check=True
    )
    hubs = [keys.hub_keys(str(tmp_path / f"seen-scheduler-{number}"), "gateway") for number in (0, 1)]
    new = keys.link_keys(str(tmp_path / "seen-gateway-0"), "gateway")
    assert new and new.public != old
    assert [hub and (hub.admits(old), hub.admits(new.public)) for hub in hubs] == [(True, True), (False, True)]


def test_readme_names_every_overlay_and_secret() -> None:
    text = (ROOT / "k8s/README.md").read_text()
    for name in [*OVERLAYS, "quire-keys-$role", "quire-model-store"]:
        assert re.search(rf"[ /`]{re.escape(name)}[ /`,]", text), name
