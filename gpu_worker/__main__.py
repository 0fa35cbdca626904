"""python -m gpu_worker --model FOLDER: one worker process. Ends with 2 when it cannot start unless something is changed."""

import os
import sys

from shared.config import parse_args


def main() -> int:
    config = parse_args("Quire's GPU worker: weights, KV pages and sampling of one device.")
    # Read by the OpenMP runtime when torch loads it. Threads that wait by spinning steal the cores they wait for as soon as
    # the gateway and the scheduler run beside them.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    from gpu_worker import service  # only now: imports torch

    return service.main(config)


if __name__ == "__main__":
    sys.exit(main())
