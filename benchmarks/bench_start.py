"""Time to the first finished step: overlapped or sequential, with and without a cache.

    python benchmarks/bench_start.py  # restore slowed to 5 s

Each start runs in a separate process, since JAX caches compiled programs. Times count from the call
of `train`.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from _timing import report_ratio

START = """
import json, sys, time
import jax, jax.numpy as jnp, numpy as np
import jstep
from jstep.loop import start as loop_start

directory, cache, kind, restore_secs = sys.argv[1], sys.argv[2] or None, sys.argv[3], float(sys.argv[4])
LAYERS, WIDTH = 60, 256
optimizer = jstep.adam(1e-3)

def loss(params, x):
    for i in range(LAYERS):
        x = jnp.tanh(x @ params["w"]) + 0.01 * jnp.sin(x * i)
    return jnp.mean(x**2)

def state():
    return jstep.TrainState.create({"w": jnp.eye(WIDTH)}, optimizer)

seen = {}
class First(jstep.Hook):
    def after_step(self, step, state, metrics):
        jax.block_until_ready(state)
        seen.setdefault("first", time.perf_counter() - then)

restore = jstep.Saver.restore
def slow(self, *args, **kwargs):
    time.sleep(restore_secs)
    return restore(self, *args, **kwargs)
jstep.Saver.restore = slow
if kind == "serial":
    loop_start._begin_early = lambda *args: None
data = jstep.batches(np.ones((4096, WIDTH), np.float32), 64)
if kind == "make":
    with jstep.Saver(directory) as saver:
        saver.save(state())
else:
    then = time.perf_counter()
    jstep.train(jstep.minimize(loss, optimizer), state(), data, 2, hooks=[First()], checkpoint_dir=directory,
                compile_cache=cache, save_checkpoint_secs=None, progress=False)
    print(json.dumps(seen))
"""  # noqa: E501


def start(directory, cache, kind, restore_secs):
    """Return the seconds to the first finished step of a run."""
    with tempfile.TemporaryDirectory() as own:  # a copy, since the run writes its final checkpoint
        subprocess.run(["cp", "-r", f"{directory}/.", own], check=True)
        command = [
            sys.executable,
            "-c",
            START,
            own if kind != "make" else str(directory),
            cache,
            kind,
        ]
        done = subprocess.run(
            [*command, str(restore_secs)], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)["first"] if done.stdout else None


def char_lm(cache):
    """Return the seconds from the call of `train` in the example to its first finished step."""
    example = pathlib.Path(__file__).parents[1] / "examples" / "char_lm.py"
    code = (
        "import runpy, sys, time, jax, jstep\n"
        f"sys.argv = [{str(example)!r}, '--steps', '2']\n"
        "train, seen = jstep.train, {}\n"
        "class First(jstep.Hook):\n"
        "    def after_step(self, step, state, metrics):\n"
        "        jax.block_until_ready(state); seen.setdefault('first', time.perf_counter())\n"
        "def timed(*args, hooks=(), **kwargs):\n"
        "    seen['then'] = time.perf_counter()\n"
        f"    return train(*args, hooks=[First(), *hooks], compile_cache={cache!r}, **kwargs)\n"
        "jstep.train = timed\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print('first', seen['first'] - seen['then'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split("first ")[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--restore", type=float, default=5.0, help="seconds that the restore takes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        saved, cache = pathlib.Path(root, "saved"), str(pathlib.Path(root, "cache"))
        saved.mkdir()
        start(saved, "", "make", 0.0)
        restore = start(saved, "", "serial", given.restore)
        compiling = start(saved, "", "serial", 0.0)
        overlapped = start(saved, cache, "overlapped", given.restore)
        warm_serial = start(saved, cache, "serial", given.restore)
        warm = start(saved, cache, "overlapped", given.restore)
    print(f"compilation alone             {compiling:6.2f} s")
    print(f"restore alone                 {given.restore:6.2f} s")
    print(f"one after the other, cold     {restore:6.2f} s")
    print(f"overlapped, cold              {overlapped:6.2f} s")
    print(f"one after the other, warm     {warm_serial:6.2f} s")
    print(f"overlapped, warm              {warm:6.2f} s")
    ratio = overlapped / max(compiling, given.restore)
    print("\nTime to the first step, from the call of train")
    is_good = report_ratio(
        "restore and compilation overlapped", "the slower of the two", ratio, 1.15
    )
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = char_lm(cache), char_lm(cache)
    print(f"\nTime to the first step of examples/char_lm.py: cold {cold:.2f} s, warm {warm:.2f} s")
    is_good = (
        report_ratio("its second start with compile_cache", "its first", warm / cold, 0.6)
        and is_good
    )
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
