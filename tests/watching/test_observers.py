"""What watches a run can be deleted, a file and the line that names it, and all else of the run
stays."""

import json
import pathlib
import re
import shutil

import pytest
from processes import python

import jstep
from jstep.watching.observers import OBSERVERS

PACKAGE = pathlib.Path(jstep.__file__).parent
OF = {
    # Goodput reads the record, which has the hashes of batches.
    "watching/recorder": {"record", "goodput", "batches"},
    "watching/process_recorder": set(),  # other processes than the first have it
    "watching/batch_watch": {"batches"},
    "watching/stall_watch": {"stalls"},
    "watching/utilization": {"utilization"},
    "watching/progress": {"progress"},
    "look/goodput": {"goodput"},
}
"""File → what is gone without it."""
PROGRAM = """
import contextlib, json, sys, tempfile, threading
import jax.numpy as jnp
import jstep

seen, shown = set(), sys.stderr

class Look(jstep.Hook):
    def after_step(self, step, state, metrics):
        seen.update(["stalls"] * any(thread.name == "jstep-stalls" for thread in threading.enumerate()))

optimizer = jstep.gradient_descent(0.25)
train_step = jstep.minimize(lambda params, x: jnp.sum(params["w"] * x), optimizer)
counter = jstep.StepCounterHook(every_n_steps=2, peak_flops=1e9)
hooks = [Look(), counter]
run = tempfile.mkdtemp()
with contextlib.redirect_stderr(open(run + "/stderr", "w+")) as written:
    state = jstep.TrainState.create({"w": jnp.ones((3, 2))}, optimizer)
    options = {"checkpoint_dir": run, "save_checkpoint_steps": 3, "progress": True}
    state = jstep.train(train_step, state, [jnp.ones((3, 2))] * 6, 6, hooks=hooks, **options)
    written.flush()
assert counter.steps_per_sec and jstep.Saver(run).all_steps() == [3, 6] and float(state.params["w"][0, 0]) == -0.5
seen.update(["utilization"] * (counter.mfu is not None), ["progress"] * ("6/6" in open(run + "/stderr").read()))
with contextlib.suppress(FileNotFoundError):
    seen.update(["record"] * (len(json.load(open(run + "/starts/model.000001.card.json"))["card"]["programs"]) == 1))
with contextlib.suppress(FileNotFoundError):
    seen.update(["batches"] * (list(json.load(open(run + "/starts/model.000001.json"))["batches"]) == ["3"]))
with contextlib.suppress(AttributeError, FileNotFoundError):
    seen.update(["goodput"] * (jstep.goodput(run).steps == 6))
print(json.dumps(sorted(seen)))
"""  # noqa: E501


def without(files, directory):
    """Copy the package without files, the lines that import from them, and those that name the
    observers."""
    shutil.copytree(PACKAGE, directory / "jstep", ignore=shutil.ignore_patterns("__pycache__"))
    for file in files:
        module = f"jstep.{file.replace('/', '.')}"
        (directory / "jstep" / f"{file}.py").unlink()
        for name in ("watching/observers.py", "__init__.py"):
            path = directory / "jstep" / name
            lines = path.read_text().splitlines(keepends=True)
            observers = [one.__name__ for one in OBSERVERS if one.__module__ in (module, "jstep")]
            listed = f"    {module.removeprefix('jstep.')}: "  # in the list of public names
            imports = [
                line for line in lines if line.startswith((f"from {module} import ", listed))
            ]
            own = [
                one for one in observers if any(re.search(rf"\b{one}\b", line) for line in imports)
            ]
            gone = {*imports, *(f"    {one},\n" for one in own)}
            path.write_text("".join(line for line in lines if line not in gone))
    return directory


def features(directory):
    """Run the program with the package of a directory, and return what it has seen."""
    out = python("-c", PROGRAM, cwd=directory, PYTHONPATH=str(directory), JAX_PLATFORMS="cpu")
    return set(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize(
    "gone", [(), *[(file,) for file in OF]], ids=lambda gone: "".join(gone) or "nothing"
)
@pytest.mark.thorough
def test_what_is_gone_without_one_file(gone, tmp_path):
    every = set().union(*OF.values())
    assert features(without(gone, tmp_path)) == every.difference(*(OF[file] for file in gone))


@pytest.mark.thorough
def test_a_run_that_nothing_watches(tmp_path):
    assert features(without(OF, tmp_path)) == set()
