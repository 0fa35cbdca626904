"""quire version: which versions run here, without importing them."""

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("version", help="print the versions of Quire and of what it runs on")
    parser.set_defaults(run=run)


def run(_parsed: argparse.Namespace) -> int:
    print(f"quire {of('quire')} (python {platform.python_version()}, torch {of('torch')}, triton {of('triton')})")
    return 0


def of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
