"""checkov over the Dockerfiles and every rendered overlay, and over copies with one mistake each that it has to notice.

make test-deploy: needs kubectl (kustomize only, no cluster) and a virtual environment of its own with checkov.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHECKOV = [str(Path(sys.executable).with_name("checkov")), "--config-file", str(Path(__file__).with_name("checkov.yaml"))]
OVERLAYS = sorted(folder.name for folder in (ROOT / "k8s/overlays").iterdir())

# (check that must fail, what is in the gpu overlay, what stands there instead)
KUBERNETES = [
    ("CKV_K8S_20", "allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true"),
    ("CKV_K8S_16", "allowPrivilegeEscalation: false", "privileged: true"),
    ("CKV_K8S_22", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
    ("CKV_K8S_40", "runAsUser: 10001", "runAsUser: 0"),
    ("CKV_K8S_37", "drop:\n", "add:\n"),
    ("CKV_K8S_14", ":0.1.0", ":latest"),
    ("CKV_K8S_9", "readinessProbe:", "x-readinessProbe:"),
    ("CKV_K8S_31", "type: RuntimeDefault", "type: Unconfined"),
    ("CKV_K8S_21", "namespace: quire", "namespace: default"),
    ("CKV_K8S_19", "automountServiceAccountToken: false", "hostNetwork: true"),
]
DOCKER = [
    ("CKV_DOCKER_8", "USER 10001:10001", "USER root"),
    ("CKV_DOCKER_3", "USER 10001:10001", ""),
    ("CKV_DOCKER_2", "HEALTHCHECK", "# HEALTHCHECK"),
    ("CKV_DOCKER_4", "COPY shared shared", "ADD shared shared"),
    ("CKV_DOCKER_1", "EXPOSE 8000", "EXPOSE 22"),
]


def failed(folder: Path, framework: str) -> dict[str, set[str]]:
    """File name -> checks that it fails."""
    command = [*CHECKOV, "--directory", str(folder), "--framework", framework, "--output", "json", "--soft-fail"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["summary"]["passed"] > 50, "it has looked at nothing"
    found: dict[str, set[str]] = {}
    for each in report["results"]["failed_checks"]:
        found.setdefault(Path(each["file_path"]).name, set()).add(
            f"{each['check_id']} {each['resource']}: {each['check_name']}"
        )
    return found


def render(overlay: str) -> str:
    command = ["kubectl", "kustomize", str(ROOT / "k8s/overlays" / overlay)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def seed(text: str, mistakes: list[tuple[str, str, str]], folder: Path, suffix: str) -> None:
    """A copy for each mistake, in a file named after the check that must notice it."""
    for check, right, wrong in mistakes:
        assert right in text, f"{check}: {right!r} is not there"
        folder.joinpath(check + suffix).write_text(text.replace(right, wrong))


def unnoticed(mistakes: list[tuple[str, str, str]], found: dict[str, set[str]], suffix: str) -> list[str]:
    return [
        check for check, _, _ in mistakes if not any(line.startswith(f"{check} ") for line in found.get(check + suffix, ()))
    ]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        rendered, wrong_pods, wrong_images = (Path(name, part) for part in ("rendered", "pods", "images"))
        for folder in (rendered, wrong_pods, wrong_images):
            folder.mkdir()
        for overlay in OVERLAYS:
            (rendered / f"{overlay}.yaml").write_text(render(overlay))
        seed(render("gpu"), KUBERNETES, wrong_pods, ".yaml")
        seed((ROOT / "docker/gateway.Dockerfile").read_text(), DOCKER, wrong_images, ".Dockerfile")
        findings = {**failed(ROOT / "docker", "dockerfile"), **failed(rendered, "kubernetes")}
        blind = unnoticed(KUBERNETES, failed(wrong_pods, "kubernetes"), ".yaml")
        blind += unnoticed(DOCKER, failed(wrong_images, "dockerfile"), ".Dockerfile")
    for file, lines in sorted(findings.items()):
        print(*(f"{file}: {line}" for line in sorted(lines)), sep="\n")
    print(f"{len(OVERLAYS)} overlays, 3 images: {sum(map(len, findings.values()))} findings", end="; ")
    print(f"{len(KUBERNETES) + len(DOCKER)} seeded mistakes, not noticed: {', '.join(blind) or 'none'}")
    return bool(findings or blind)


if __name__ == "__main__":
    sys.exit(main())
