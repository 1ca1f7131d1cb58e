"""`import jstep`, alone and with all that a training script uses, beside `import jax`: each in processes of its own.

python tests/benchmarks/bench_import.py
"""

import subprocess
import sys
import time

from _timing import report

STATEMENTS = {
    "import jstep": "import jstep",
    "import jstep, all it has": "import jstep; [getattr(jstep, name) for name in jstep.__all__]",
    "import jax": "import jax",
}


def main(rounds=9):
    times = {name: [] for name in STATEMENTS}
    for _ in range(rounds):
        for name, statement in STATEMENTS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            times[name].append(time.perf_counter() - start)
    bounds = {("import jstep", "import jax"): 1.2, ("import jstep, all it has", "import jax"): None}
    return report("Importing, a process each, taking turns", times, bounds, 1e3)


if __name__ == "__main__":
    sys.exit(not main())
