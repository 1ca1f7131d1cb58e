"""Import time of `jstep`: `import jstep`, the import of all its names, and `python -m jstep
inspect`, each compared with `import jax`.

Each runs in a separate process.

python benchmarks/bench_import.py
"""

import subprocess
import sys
import tempfile
import time

from _timing import report

import jstep

COMMANDS = {
    "import jstep": ["-c", "import jstep"],
    "import jstep, all names": [
        "-c",
        "import jstep; [getattr(jstep, name) for name in jstep.__all__]",
    ],
    "jstep inspect DIRECTORY": ["-m", "jstep", "inspect"],
    "import jax": ["-c", "import jax"],
}


def main(rounds=9):
    times = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as directory:
        with jstep.Saver(directory, max_to_keep=None) as saver:
            for step in range(5):
                state = jstep.TrainState.create({"w": 1.0}, jstep.adam(1e-3))
                saver.save(state.replace(global_step=state.global_step + step))
        for _ in range(rounds):
            for name, command in COMMANDS.items():
                line = [sys.executable, *command, *[directory] * ("inspect" in command)]
                start = time.perf_counter()
                subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
                times[name].append(time.perf_counter() - start)
    bounds = {
        ("import jstep", "import jax"): 1.2,
        ("import jstep, all names", "import jax"): None,
        ("jstep inspect DIRECTORY", "import jax"): 0.3,
    }
    return report("Import, one process each, interleaved", times, bounds, 1e3)


if __name__ == "__main__":
    sys.exit(not main())
