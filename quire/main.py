"""The quire command: serve, chat, bench, drain, quantize, keys, version."""

import argparse
import sys
from importlib import import_module

COMMANDS = ("serve", "chat", "bench", "drain", "quantize", "keys", "version")  # each is a module with add_command


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="quire", description="Quire serves large language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:  # what is not asked for need not be loaded
        import_module(f"quire.{name}").add_command(commands)
    parsed = parser.parse_args(words)
    sys.exit(parsed.run(parsed))


if __name__ == "__main__":
    main()
