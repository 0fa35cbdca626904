"""The real worker, but one token kills its process when a step reads it, as a fault in a kernel might.

python -m tests.poisoned_worker TOKEN --model ... (all flags of python -m gpu_worker)
"""

import os
import sys

from gpu_worker.runner import Runner, Step
from gpu_worker.service import main
from shared.columns import read_i32
from shared.config import parse_args
from shared.messages import StepPlan

if __name__ == "__main__":
    poison = int(sys.argv[1])
    launch = Runner.launch

    def launch_or_die(self: Runner, plan: StepPlan) -> Step:
        if poison in read_i32(plan.tokens).tolist():
            os._exit(139)
        return launch(self, plan)

    Runner.launch = launch_or_die  # type: ignore[method-assign]
    sys.exit(main(parse_args("A worker that one token kills.", sys.argv[2:])))
