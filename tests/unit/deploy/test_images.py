"""The images and the compose stack, as far as their files tell; tests/compose/run.sh runs them for real."""

import ast
import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from shared.config import from_sources

ROOT = Path(__file__).resolve().parents[3]
ROLES = {"gateway": "gateway", "scheduler": "scheduler", "worker": "gpu_worker"}
MODULES = {
    "opentelemetry": "opentelemetry-sdk",
    "pynvml": "nvidia-ml-py",
    "google": "protobuf",
    "prometheus_client": "prometheus-client",
    "zmq": "pyzmq",
}  # whose name is another
# Imported where they are not needed to run: beside torch, or for models of the hub only.
OPTIONAL = {
    "scheduler": {"huggingface_hub", "obstore", "tqdm", "numpy"},
    "gateway": {"numpy"},
    "worker": {"torch", "triton", "opentelemetry"},
}
LOADING_S = 1800  # that a worker may take to read its model, as in k8s/base/worker.yaml
HADOLINT, SHELLCHECK = (Path(sys.executable).with_name(name) for name in ("hadolint", "shellcheck"))


def dockerfile(role: str) -> str:
    return (ROOT / f"docker/{role}.Dockerfile").read_text()


@pytest.mark.parametrize("role", ROLES)
def test_hadolint(role: str) -> None:
    done = subprocess.run([HADOLINT, ROOT / f"docker/{role}.Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_hadolint_notices_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN pip install torch\n")
    assert subprocess.run([HADOLINT, tmp_path / "Dockerfile"], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize("role", ROLES)
def test_images_are_hardened(role: str) -> None:
    text = dockerfile(role)
    assert "USER 10001:10001" in text and "HEALTHCHECK" in text
    assert re.search(r'ENTRYPOINT \["python", "-m", "\w+"\]', text)
    final = text.split("FROM ${PYTHON}")[-1]
    assert "pip" not in final, "the final image installs nothing"
    assert f"COPY {ROLES[role]} {ROLES[role]}" in final
    others = set(ROLES.values()) - {ROLES[role]}
    assert not any(f"COPY {other}" in final for other in others)


def versions(path: Path) -> dict[str, str]:
    pairs = [line.split("==") for line in path.read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("role", ROLES)
def test_versions_are_those_of_the_lock_file(role: str) -> None:
    lock = versions(ROOT / "requirements.lock")
    wanted = versions(ROOT / f"docker/requirements-{role}.txt")
    assert wanted and {name: lock.get(name) for name in wanted} == wanted, "run python docker/split_lock.py"


def test_gateway_and_scheduler_are_without_torch() -> None:
    for role in ("gateway", "scheduler"):
        heavy = {"torch", "transformers", "triton", "accelerate", "numpy", "safetensors"}
        assert not heavy & set(versions(ROOT / f"docker/requirements-{role}.txt"))


def test_torch_is_that_of_the_makefile() -> None:
    wanted = re.search(r"ARG TORCH=(torch==[\d.]+)", dockerfile("worker"))
    assert wanted and wanted[1] in (ROOT / "Makefile").read_text()


def test_a_worker_without_its_gpu_does_not_start_on_the_cpu() -> None:
    final = dockerfile("worker").split("FROM ${PYTHON}")[-1]
    assert "ARG VARIANT=cuda\n" in final and re.search(r"ENV [^#]*QUIRE_DEVICE=\$VARIANT\n", final)
    for variant in ("cuda", "cpu"):
        assert from_sources({}, {"QUIRE_DEVICE": variant}).device == variant


def imports(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0]


@pytest.mark.parametrize("role", ROLES)
def test_images_have_what_their_code_imports(role: str) -> None:
    ours = {*ROLES.values(), "shared", "quire"}
    wanted = {*imports(ROOT / ROLES[role]), *imports(ROOT / "shared")} - set(sys.stdlib_module_names) - ours
    has = set(versions(ROOT / f"docker/requirements-{role}.txt"))
    missing = {name for name in wanted if canonicalize_name(MODULES.get(name, name)) not in has}
    assert missing - OPTIONAL[role] == set()


# --- compose ----------------------------------------------------------------------------------------------------------


def stack() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return loaded


def environment(service: dict[str, Any]) -> dict[str, str]:
    given = service.get("environment", {})
    pairs = given.items() if isinstance(given, dict) else (item.split("=", 1) for item in given if "=" in item)
    return {name: re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", str(value)) for name, value in pairs}


def compose_faults(loaded: dict[str, Any]) -> Iterator[str]:
    services = loaded["services"]
    yield from _health_faults(services)
    for name, service in services.items():
        yield from _service_faults(name, service, loaded)
    for role, ports in (("gateway", "5711"), ("worker", "5712")):
        link = environment(services[role]).get(f"QUIRE_{role.upper()}_LINK")
        if link != f"tcp://scheduler:{ports}" or not re.search(rf"EXPOSE .*\b{ports}\b", dockerfile("scheduler")):
            yield f"{role} connects to {link}"


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])  # type: ignore[index]


def check_of(role: str, service: dict[str, Any]) -> tuple[str, str, int]:
    """Port, path and start period of the health check that the container really has."""
    test, start = re.search(r"CMD (\[.*\])", dockerfile(role)), re.search(r"--start-period=(\S+)", dockerfile(role))
    assert test and start
    given = service.get("healthcheck", {})
    command = given.get("test", ["CMD", *ast.literal_eval(test[1])])
    return command[4], command[5], seconds(given.get("start_period", start[1]))


def _health_faults(services: dict[str, Any]) -> Iterator[str]:
    for role in ROLES:
        port, path, start_s = check_of(role, services[role])
        if f"QUIRE_METRICS_PORT={port} " not in dockerfile(role):
            yield f"{role} is asked for {path} on port {port}, which may want a key or TLS"
        if role != "scheduler" and start_s < LOADING_S:
            yield f"{role} has {start_s} s until it must be healthy; a large model loads longer"


def _service_faults(name: str, service: dict[str, Any], loaded: dict[str, Any]) -> Iterator[str]:
    if service.get("read_only") is not True or service.get("cap_drop") != ["ALL"]:
        yield f"{name} may do more than it must"
    if "no-new-privileges:true" not in service.get("security_opt", []):
        yield f"{name} may gain privileges"
    if service.get("restart") not in (("no",) if name in ("keys", "model") else ("unless-stopped",)):
        yield f"{name} has the restart policy {service.get('restart')}"
    if ("ports" in service) != (name == "gateway"):
        yield f"{name} is {'' if 'ports' in service else 'not '}published"
    if "latest" in service["image"] or ":" not in service["image"]:
        yield f"{name}: {service['image']} is no fixed version"
    for volume in service.get("volumes", []):
        source = str(volume["target"] if isinstance(volume, dict) else volume).split(":")[0]
        source = re.sub(r"\$\{\w+:-([^}]*)\}.*", r"\1", str(volume)) if "${" in str(volume) else source
        if source.startswith("./") and not (ROOT / source).exists():
            yield f"{name} mounts {source}, which is not there"
        elif not source.startswith(("./", "/")) and source not in loaded["volumes"]:
            yield f"{name} mounts {source}, which is no volume"
    targets = [str(volume).split(":")[-2 if str(volume).endswith(":ro") else -1] for volume in service.get("volumes", [])]
    memory = {target: options for target, _, options in (str(each).partition(":") for each in service["tmpfs"])}
    if name in ROLES and "/cache" not in targets and "uid=10001" not in memory.get("/cache", ""):
        yield f"{name} cannot write to its cache"  # a mode alone does not do: runc puts back that of the image's folder
    for other in service.get("depends_on", {}):
        if other not in loaded["services"]:
            yield f"{name} waits for {other}, which is no service"
    if build := service.get("build"):
        if not (ROOT / build["dockerfile"]).is_file():
            yield f"{name} is built from {build['dockerfile']}, which is not there"
        try:
            from_sources({}, {key: value for key, value in environment(service).items() if key.startswith("QUIRE_")})
        except ValueError as error:
            yield f"{name} would refuse its settings: {error}"
    if name in ROLES and service.get("env_file") != [{"path": "${QUIRE_ENV_FILE:-quire.env}", "required": False}]:
        yield f"{name} has no place for other settings"
    if name in ROLES and "QUIRE_CURVE_DIR" not in environment(service):
        yield f"{name} has no keys"


def test_the_stack_is_sound() -> None:
    assert list(compose_faults(stack())) == []


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "writable": (lambda s: s["worker"].update(read_only=False), "worker may do more"),
    "root's cache": (lambda s: s["gateway"].update(tmpfs=["/cache:mode=1777"]), "gateway cannot write to its cache"),
    "privileges": (lambda s: s["gateway"].update(security_opt=[]), "gateway may gain"),
    "no restart": (lambda s: s["scheduler"].update(restart="no"), "scheduler has the restart policy"),
    "published": (lambda s: s["scheduler"].update(ports=["5711:5711"]), "scheduler is published"),
    "hidden": (lambda s: s["gateway"].pop("ports"), "gateway is not published"),
    "latest": (lambda s: s["grafana"].update(image="grafana/grafana:latest"), "no fixed version"),
    "file": (lambda s: s["prometheus"]["volumes"].append("./monitoring/rule:/x"), "which is not there"),
    "volume": (lambda s: s["worker"]["volumes"].append("kernels:/x"), "which is no volume"),
    "dependency": (lambda s: s["gateway"]["depends_on"].update(broker={}), "waits for broker"),
    "dockerfile": (lambda s: s["gateway"]["build"].update(dockerfile="Dockerfile"), "is built from Dockerfile"),
    "setting": (lambda s: s["worker"]["environment"].update(QUIRE_MAX_LEN="1"), "would refuse its settings"),
    "client port": (lambda s: s["gateway"]["healthcheck"]["test"].__setitem__(4, "8000"), "asked for /ready on port 8000"),
    "impatient": (lambda s: s["gateway"]["healthcheck"].update(start_period="300s"), "a large model loads longer"),
    "settings": (lambda s: s["worker"].pop("env_file"), "worker has no place for other settings"),
    "no keys": (lambda s: s["worker"]["environment"].pop("QUIRE_CURVE_DIR"), "worker would refuse its settings"),
    "address": (lambda s: s["worker"]["environment"].update(QUIRE_WORKER_LINK="tcp://scheduler:5711"), "worker connects to"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    change, expected = MISTAKES[mistake]
    loaded = copy.deepcopy(stack())
    change(loaded["services"])
    assert any(expected in fault for fault in compose_faults(loaded)), list(compose_faults(loaded))


def test_the_options_of_the_gateway_are_settings_and_mounted() -> None:
    for option, names in (("tls", {"QUIRE_TLS_CERT", "QUIRE_TLS_KEY"}), ("tenants", {"QUIRE_API_KEY_FILE"})):
        gateway = yaml.safe_load((ROOT / f"compose.{option}.yaml").read_text())["services"]["gateway"]
        (mount,) = (volume.rsplit(":", 2)[1] for volume in gateway["volumes"])
        assert gateway["environment"].keys() == names
        assert all(Path(file).is_relative_to(mount) for file in gateway["environment"].values())
        from_sources({}, gateway["environment"])


def gpus(service: dict[str, Any]) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", number) for number in device["device_ids"]]


def test_a_second_replica_has_a_gpu_of_its_own_and_is_scraped() -> None:
    text = (ROOT / "compose.replicas.yaml").read_text().replace("!override ", "")
    (second,) = yaml.safe_load(text)["services"].values()
    assert second["extends"] == {"file": "compose.yaml", "service": "worker"}
    assert (gpus(stack()["services"]["worker"]), gpus(second)) == (["0"], ["1"])
    jobs = yaml.safe_load((ROOT / "monitoring/prometheus.yml").read_text())["scrape_configs"]
    (names,) = (job["dns_sd_configs"][0]["names"] for job in jobs if job["job_name"] == "worker")
    assert set(names) <= set(second["networks"]["inner"]["aliases"])


def test_each_role_sees_its_own_secret_only() -> None:
    services = stack()["services"]
    for role in ROLES:
        assert [volume for volume in services[role]["volumes"] if "keys" in str(volume)] == [f"keys-{role}:/keys:ro"]


def test_shellcheck() -> None:
    scripts = [ROOT / "tests/compose/run.sh", ROOT / "monitoring/check_dashboard.sh", ROOT / ".ci/run"]
    done = subprocess.run([SHELLCHECK, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
