"""python -m gpu_worker.parallel.rank RANK SIZE GROUP PORT LISTENER [settings]: one rank; only the launcher starts it."""

import argparse
import sys

from shared import config as settings
from shared.process import wait_quietly


def main(arguments: list[str]) -> int:
    wait_quietly()
    from gpu_worker import service  # only now: imports torch
    from gpu_worker.parallel.group import Seat

    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    config = settings.from_sources(vars(parser.parse_args(arguments[5:])), {})
    return service.main(config, Seat(*map(int, arguments[:5])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
