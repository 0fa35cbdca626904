"""python -m shared.probe PORT PATH: exit 0 when http://127.0.0.1:PORT/PATH answers 2xx within 3 s. For health checks."""

import sys
from http.client import HTTPConnection, HTTPException

TIMEOUT_S = 3.0


def probe(port: int, path: str) -> str:
    """Empty when the answer is 2xx, else what is wrong."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return (
            "" if 200 <= response.status < 300 else f"status {response.status}: {response.read(500).decode('utf-8', 'replace')}"
        )
    except (OSError, HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def main(argv: list[str]) -> int:
    if len(argv) != 2 or not argv[0].isdecimal() or not argv[1].startswith("/"):
        print("usage: probe PORT /PATH", file=sys.stderr)
        return 2
    wrong = probe(int(argv[0]), argv[1])
    if wrong:
        print(wrong, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
