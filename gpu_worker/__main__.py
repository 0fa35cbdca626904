"""python -m gpu_worker --model FOLDER: one replica of the model. Ends with 2 when it cannot start unless something is changed.

It is one worker process, or the launcher of as many ranks as tensor_parallel_size says.
"""

import sys

from shared.config import parse_args
from shared.process import wait_quietly


def main() -> int:
    config = parse_args("Quire's GPU worker: weights, KV pages and sampling of one copy of the model.")
    if config.tensor_parallel_size > 1:
        from gpu_worker.parallel import launcher

        return launcher.main(config)
    wait_quietly()
    from gpu_worker import service  # only now: imports torch

    return service.main(config)


if __name__ == "__main__":
    sys.exit(main())
