"""python -m scheduler: one scheduler process."""

import gc
import sys

import uvloop

from scheduler.service import serve
from shared.config import FATAL_EXIT, parse_args
from shared.observe import setup_logging

GC_THRESHOLDS = (50_000, 20, 50)  # what ends is freed by its references; a collection only stops the plans


def main() -> int:
    config = parse_args("The scheduler of a cell: owns pages, queue, placement and step plans.")
    setup_logging(config)
    gc.freeze()  # modules live as long as the process
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        uvloop.run(serve(config))
    except (OSError, ValueError) as error:  # a port in use, an address that is not loopback, a broken key file
        print(f"scheduler: {error}", file=sys.stderr)
        return FATAL_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
