"""make test-clients: the libraries that people call OpenAI with, against a running `quire serve` with the real model.

The server runs from this interpreter's environment, the clients from their own:
    python -m tests.clients.run .venv-clients
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.serving import Served, ended

HERE = Path(__file__).resolve().parent
PYTEST = ["-m", "pytest", "-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "--timeout=100"]
PYTEST += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", f"--rootdir={HERE}"]


def call(command: list[str], url: str) -> None:
    environment = os.environ | {"CLIENTS_URL": url, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, cwd=HERE, env=environment, check=False)
    if ran.returncode:
        sys.exit(f"{' '.join(command)} ended with {ran.returncode}")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    server = Served("--dtype=float32")
    with ended(server):
        call([str(folder / "bin" / "python"), *PYTEST, str(HERE / "python_clients.py")], server.url)
        if not (folder / "npm" / ".installed").is_file():
            print("openai from npm: SKIPPED, there is no node or no npm on this machine")
            return
        script = shutil.copy(HERE / "npm_client.mjs", folder / "npm")  # node looks for packages beside the script
        call(["node", str(script)], server.url)


if __name__ == "__main__":
    main()
