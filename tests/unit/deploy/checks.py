"""What an API server (or a person at night) would find wrong in a set of manifests that a schema does not."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from shared.config import from_sources

Object = dict[str, Any]
QUANTITY = re.compile(r"^\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")
PORT_NAME = re.compile(r"^(?=.{1,15}$)(?=.*[a-z])[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
WORKLOADS = ("Deployment", "Job", "StatefulSet", "DaemonSet")
# Secrets made by hand (k8s/README.md) and names of the cluster's own.
BY_HAND = {"quire-keys-gateway", "quire-keys-scheduler", "quire-keys-worker", "quire-tls", "quire-tenants"}
# What answers a probe whatever keys and certificates the clients' port asks for.
PROBED = {
    "gateway": {("metrics", "/health"), ("metrics", "/ready")},
    "scheduler": {("metrics", "/metrics")},
    "worker": {("metrics", "/metrics"), ("metrics", "/ready")},
}
LISTENS = {
    "gateway": {8000, 9100},
    "scheduler": {5711, 5712, 9100},
    "worker": {9100},
    "fetch": set[int](),
    "deletion-cost": set[int](),
}


def load(text: str) -> list[Object]:
    return [each for each in yaml.safe_load_all(text) if each]


def faults(objects: list[Object]) -> list[str]:
    """All of them, each naming the object."""
    return [
        f"{each['kind']}/{each['metadata']['name']}: {fault}"
        for check in CHECKS
        for each in objects
        for fault in check(each, objects)
    ]


def named(objects: list[Object], kind: str, name: str) -> Object | None:
    return next((each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)), None)


def template(each: Object) -> Object | None:
    if each["kind"] == "CronJob":
        each = {"kind": "Job", "spec": each["spec"]["jobTemplate"]["spec"]}
    return each["spec"]["template"] if each["kind"] in WORKLOADS else None


def containers(each: Object) -> list[Object]:
    pod = template(each)
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]] if pod else []


def selects(selector: Object, labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(rule["key"]) in rule.get("values", []) for rule in selector.get("matchExpressions", [])
    )


def pod_labels(objects: list[Object]) -> list[dict[str, str]]:
    return [pod["metadata"]["labels"] for each in objects if (pod := template(each))]


def check_selectors(each: Object, objects: list[Object]) -> Iterator[str]:
    kind, spec = each["kind"], each.get("spec", {})
    if kind == "Deployment" and not selects(spec["selector"], spec["template"]["metadata"]["labels"]):
        yield "its selector does not match its own pods"
    if kind == "Service" and not any(selects({"matchLabels": spec["selector"]}, labels) for labels in pod_labels(objects)):
        yield "selects no pod"
    if kind == "PodDisruptionBudget" and not any(selects(spec["selector"], labels) for labels in pod_labels(objects)):
        yield "selects no pod"
    budget = (kind, each["metadata"]["name"]) == ("PodDisruptionBudget", "quire-worker")
    if budget and spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
        yield "no node could be drained while the scheduler is away"
    if kind == "NetworkPolicy":
        for selector in [spec["podSelector"], *(peer["podSelector"] for peer in _own_peers(spec))]:
            if not any(selects(selector, labels) for labels in pod_labels(objects)):
                yield f"selects no pod: {selector}"
    if kind == "ServiceMonitor":
        services = [o for o in objects if o["kind"] == "Service" and selects(spec["selector"], o["metadata"].get("labels", {}))]
        ports = {port["name"] for service in services for port in service["spec"]["ports"]}
        if not services:
            yield "selects no service"
        for endpoint in spec["endpoints"]:
            if endpoint["port"] not in ports:
                yield f"no service has a port named {endpoint['port']}"
            elif endpoint["port"] != "metrics":
                yield f"scrapes {endpoint['port']}, which may want a key or TLS"


def _own_peers(spec: Object) -> Iterator[Object]:
    for way, side in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(way, []):
            yield from (peer for peer in rule.get(side, []) if "podSelector" in peer and "namespaceSelector" not in peer)


def check_ports(each: Object, objects: list[Object]) -> Iterator[str]:
    for container in containers(each):
        ports = container.get("ports", [])
        for port in ports:
            if not PORT_NAME.match(port["name"]):
                yield f"port name {port['name']!r} is not allowed"
            if port["containerPort"] not in LISTENS[container["name"]]:
                yield f"{container['name']} does not listen on {port['containerPort']}"
        names = {port["name"] for port in ports}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.get(probe, {}).get("httpGet")
            if asked and asked["port"] not in names:
                yield f"{probe} names no port of its container"
            elif asked and (asked["port"], asked["path"]) not in PROBED[container["name"]]:
                yield f"{probe} asks for {asked['path']} on {asked['port']}, which may want a key or TLS"
    if each["kind"] == "Service":
        selector = {"matchLabels": each["spec"]["selector"]}
        pods = [o for o in objects if (pod := template(o)) and selects(selector, pod["metadata"]["labels"])]
        known = {port["name"] for pod in pods for container in containers(pod) for port in container.get("ports", [])}
        yield from (f"no pod has port {p['targetPort']}" for p in each["spec"]["ports"] if p["targetPort"] not in known)
    if each["kind"] == "NetworkPolicy":
        yield from _policy_ports(each, objects)


def _policy_ports(each: Object, objects: list[Object]) -> Iterator[str]:
    chosen = [o for o in objects if (pod := template(o)) and selects(each["spec"]["podSelector"], pod["metadata"]["labels"])]
    known = {port["name"] for pod in chosen for container in containers(pod) for port in container.get("ports", [])}
    for rule in each["spec"].get("ingress", []):
        for port in rule.get("ports", []):
            if isinstance(port["port"], str) and port["port"] not in known:
                yield f"lets traffic in to port {port['port']}, which its pods do not have"


def check_volumes(each: Object, objects: list[Object]) -> Iterator[str]:
    pod = template(each)
    if pod is None:
        return
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    mounted = {mount["name"] for container in containers(each) for mount in container.get("volumeMounts", [])}
    yield from (f"mounts {name}, which is no volume" for name in sorted(mounted - set(volumes)))
    yield from (f"volume {name} is not mounted" for name in sorted(set(volumes) - mounted))
    for volume in volumes.values():
        if claim := volume.get("persistentVolumeClaim"):
            if not named(objects, "PersistentVolumeClaim", claim["claimName"]):
                yield f"there is no claim {claim['claimName']}"
        elif (secret := volume.get("secret")) and secret["secretName"] not in BY_HAND:
            yield f"there is no secret {secret['secretName']}"
    for container in containers(each):
        for source in container.get("envFrom", []):
            config = source.get("configMapRef")
            if config and not named(objects, "ConfigMap", config["name"]):
                yield f"there is no config map {config['name']}"
        for item in container.get("env", []):
            wanted = item.get("valueFrom", {}).get("configMapKeyRef")
            holder = wanted and named(objects, "ConfigMap", wanted["name"])
            if wanted and wanted["key"] not in (holder or {}).get("data", {}):
                yield f"{item['name']} is to come from {wanted['key']} of {wanted['name']}, which is not there"


def check_quantities(each: Object, objects: list[Object]) -> Iterator[str]:
    for container in containers(each):
        resources = container.get("resources", {})
        for side in ("requests", "limits"):
            for name, value in resources.get(side, {}).items():
                if not QUANTITY.match(str(value)):
                    yield f"{side}.{name} = {value!r} is no quantity"
                if "/" in name and not str(value).isdigit():
                    yield f"{side}.{name} = {value!r} must be a whole number"
        if "memory" not in resources.get("limits", {}) or "cpu" not in resources.get("requests", {}):
            yield f"{container['name']} lacks a memory limit or a cpu request"
    if each["kind"] == "PersistentVolumeClaim" and not QUANTITY.match(str(each["spec"]["resources"]["requests"]["storage"])):
        yield "storage is no quantity"


def check_autoscaler(each: Object, objects: list[Object]) -> Iterator[str]:
    if each["kind"] != "HorizontalPodAutoscaler":
        return
    spec = each["spec"]
    target = named(objects, spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    if target is None:
        yield "its target does not exist"
    elif "replicas" in target["spec"]:
        yield "its target also fixes replicas: every apply would undo the scaling"
    if not 1 <= spec["minReplicas"] <= spec["maxReplicas"]:
        yield f"minReplicas {spec['minReplicas']} and maxReplicas {spec['maxReplicas']} do not fit"
    for metric in spec["metrics"]:
        described = metric.get("object", {}).get("describedObject")
        if described and not named(objects, described["kind"], described["name"]):
            yield f"there is no {described['kind']} {described['name']}"


def check_hardening(each: Object, objects: list[Object]) -> Iterator[str]:
    """The restricted pod security level, and a little more."""
    pod = template(each)
    if pod is None:
        return
    spec, security = pod["spec"], pod["spec"].get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("runAsUser") != 10001:
        yield "may run as root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False and not named(objects, "Role", spec.get("serviceAccountName", "")):
        yield "gets a service account token"
    if spec.get("enableServiceLinks") is not False:
        yield "gets variables named after services: QUIRE_SCHEDULER_PORT would be refused as an unknown setting"
    if any(key in spec for key in ("hostNetwork", "hostPID", "hostIPC")):
        yield "uses the host's namespaces"
    namespace = next((o for o in objects if o["kind"] == "Namespace"), None)
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] if namespace else ""
    if level == "restricted" and any("hostPath" in volume for volume in spec.get("volumes", [])):
        yield "has a hostPath volume in a restricted namespace"
    for container in containers(each):
        inside = container.get("securityContext", {})
        if inside.get("allowPrivilegeEscalation") is not False or inside.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{container['name']} may gain privileges"
        if inside.get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']} may write to its root"
        if container["image"].endswith(":latest") or ":" not in container["image"]:
            yield f"{container['image']} is no fixed version"


def check_settings(each: Object, objects: list[Object]) -> Iterator[str]:
    """The role's own parser takes what it will be given, with the addresses the services really have."""
    for container in containers(each):
        environment: dict[str, str] = {}
        for source in container.get("envFrom", []):
            config = named(objects, "ConfigMap", source.get("configMapRef", {}).get("name", ""))
            environment |= config["data"] if config else {}
        environment |= {item["name"]: item.get("value", "some-name") for item in container.get("env", [])}
        try:
            config_values = from_sources({}, environment)
        except ValueError as error:
            yield f"{container['name']} would refuse its settings: {error}"
            continue
        for link in (config_values.gateway_link, config_values.worker_link):
            host, _, port = link.removeprefix("tcp://").rpartition(":")
            service = named(objects, "Service", host)
            if host != "127.0.0.1" and (not service or int(port) not in {p["port"] for p in service["spec"]["ports"]}):
                yield f"{container['name']} connects to {link}, which no service offers"


def check_drain(each: Object, objects: list[Object]) -> Iterator[str]:
    pod = template(each)
    if pod is None or each["metadata"]["name"] not in ("quire-gateway", "quire-worker"):
        return
    container = pod["spec"]["containers"][0]
    if "preStop" not in container.get("lifecycle", {}):
        yield "has no preStop: it would be stopped while it still gets work"
    if pod["spec"].get("terminationGracePeriodSeconds", 30) < 60:
        yield "has too little time to drain"
    if container.get("readinessProbe", {}).get("httpGet", {}).get("path") != "/ready":
        yield "counts as ready before it gets work: a rollout would go on to the next"
    probe = container.get("startupProbe", {})
    if each["metadata"]["name"] == "quire-worker" and probe.get("periodSeconds", 0) * probe.get("failureThreshold", 0) < 600:
        yield "has too little time to load a model"


def check_patience(each: Object, objects: list[Object]) -> Iterator[str]:
    """A rollout is not given up while a worker may still load its weights, and gateways are ready no sooner than a worker."""
    worker = named(objects, "Deployment", "quire-worker")
    if each["kind"] != "Deployment" or each["metadata"]["name"] == "quire-scheduler" or worker is None:
        return
    probe = worker["spec"]["template"]["spec"]["containers"][0].get("startupProbe", {})
    loading_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    given_s = each["spec"].get("progressDeadlineSeconds", 600)
    if given_s <= loading_s:
        yield f"counts as failed after {given_s} s, while a worker may load for {loading_s} s"


def check_one_scheduler(each: Object, objects: list[Object]) -> Iterator[str]:
    if (each["kind"], each["metadata"]["name"]) != ("Deployment", "quire-scheduler"):
        return
    if each["spec"].get("replicas") != 1 or each["spec"].get("strategy") != {"type": "Recreate"}:
        yield "must be one, and never two during an update"


CHECKS: tuple[Callable[[Object, list[Object]], Iterator[str]], ...] = (
    check_selectors,
    check_ports,
    check_volumes,
    check_quantities,
    check_autoscaler,
    check_hardening,
    check_settings,
    check_drain,
    check_patience,
    check_one_scheduler,
)
