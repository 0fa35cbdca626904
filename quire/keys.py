"""quire keys: make the key files of the inner sockets (SECURITY.md)."""

import argparse


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "make the keys that encrypt the links between the roles"
    parser = commands.add_parser("keys", help=text, description=f"{text.capitalize()}; existing ones stay.")
    parser.add_argument("folder", metavar="DIR", help="where the keys of all roles are kept, for --curve-dir on one machine")
    parser.add_argument("split", metavar="OUT", nargs="?", help="also make a folder per role with what that role may see")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    from shared import keys  # only now: loads ZeroMQ

    return keys.main([parsed.folder, *([parsed.split] if parsed.split else [])])
