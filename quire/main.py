"""The quire command: serve, chat, bench, quantize, keys, version."""

import argparse
import sys

from quire import bench, chat, keys, quantize, serve, version


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="quire", description="Quire serves large language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, chat, bench, quantize, keys, version):
        module.add_command(commands)
    parsed = parser.parse_args(argv)
    sys.exit(parsed.run(parsed))


if __name__ == "__main__":
    main()
