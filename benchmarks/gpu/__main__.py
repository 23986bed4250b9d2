"""``python -m benchmarks.gpu``."""

import os
import sys

from benchmarks.gpu import requirements

if __name__ == "__main__":
    problems = requirements.unmet()
    if problems:
        sys.exit(requirements.message(problems))

    # torch's profiler would write lines between those of the progress bar
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from benchmarks.gpu.run import main

    sys.exit(main())
