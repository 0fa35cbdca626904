"""python -m shared.deletion_cost METRICS-URL: tell Kubernetes which worker pods to end first when it scales down.

Sets controller.kubernetes.io/pod-deletion-cost of every worker pod to its pages that hold something (cached or in use), so the
pod whose cache is worth least goes first. Runs in the cluster as a job of its own; nothing else talks to the API server.
"""

import json
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc"
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
_PAGES = re.compile(r'^quire_pages\{replica="([^"]+)",state="(?:cached|held)"\} ([0-9.e+]+)$', re.MULTILINE)


def warm_pages(metrics: str) -> dict[str, int]:
    """Replica (the name of its pod) -> pages that hold something."""
    pages: Counter[str] = Counter()
    for replica, count in _PAGES.findall(metrics):
        pages[replica] += int(float(count))
    return dict(pages)


def patch(pod: str, cost: int, api: str, account: Path) -> urllib.request.Request:
    body = json.dumps({"metadata": {"annotations": {ANNOTATION: str(cost)}}}).encode()
    headers = {
        "Authorization": f"Bearer {(account / 'token').read_text().strip()}",
        "Content-Type": "application/merge-patch+json",
    }
    url = f"{api}/api/v1/namespaces/{(account / 'namespace').read_text().strip()}/pods/{pod}"
    return urllib.request.Request(url, body, headers, method="PATCH")


def run(metrics_url: str, api: str = API, account: Path = ACCOUNT) -> list[str]:
    """Set the cost of every pod; what failed, a line each."""
    with urllib.request.urlopen(metrics_url, timeout=10) as answer:
        pages = warm_pages(answer.read().decode())
    authority = account / "ca.crt"
    trusted = ssl.create_default_context(cafile=str(authority)) if authority.exists() else None
    failed = []
    for pod, cost in pages.items():
        try:
            urllib.request.urlopen(patch(pod, cost, api, account), timeout=10, context=trusted).close()
        except urllib.error.HTTPError as error:  # a pod that is gone already, for one
            failed.append(f"{pod}: {error.code} {error.reason}")
    return failed


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: deletion_cost METRICS-URL", file=sys.stderr)
        return 2
    try:
        failed = run(argv[0])
    except OSError as error:
        failed = [str(error)]
    for line in failed:
        print(f"deletion_cost: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
