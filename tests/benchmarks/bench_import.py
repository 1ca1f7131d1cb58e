"""`import jstep` beside `import jax`: each in processes of its own, taking turns.

python tests/benchmarks/bench_import.py
"""

import subprocess
import sys
import time

from _timing import report


def main(rounds=9):
    times = {"import jstep": [], "import jax": []}
    for _ in range(rounds):
        for statement, seconds in times.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            seconds.append(time.perf_counter() - start)
    return report("Importing, a process each", times, {("import jstep", "import jax"): 1.2}, 1e3)


if __name__ == "__main__":
    sys.exit(not main())
