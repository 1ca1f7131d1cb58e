"""The kernel alone: a copy of the package without the rooms that are attached to a run, or without
one of them."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest
from processes import python
from source_files import ROOT
from test_architecture import KERNEL, OTHERS, package_of, pairs

import jstep

PACKAGE = pathlib.Path(jstep.__file__).parent
FIRST = """
import sys, time, jax, jax.numpy as jnp, jstep
x = jax.random.normal(jax.random.key(0), (4096, 8))
data = jstep.batches((x, x @ jnp.arange(8.0)), batch_size=32, seed=0)
loss_fn = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)
optimizer = jstep.adamw(jstep.warmup_cosine_decay(0.01, warmup_steps=100, decay_steps=500_000))
state = jstep.TrainState.create({"w": jnp.zeros(8)}, optimizer)
step = jstep.minimize(loss_fn, optimizer)
"""
"""README's first program, without its run."""
TRAIN = (
    FIRST
    + """
class Wait(jstep.Hook):
    def __init__(self, step):
        self.step = step
    def after_step(self, step, state, metrics):
        if step == self.step:
            print("waits", flush=True)
            time.sleep(2)  # a signal that comes now takes effect at the end of this iteration

hooks = [Wait(int(sys.argv[3]))] if len(sys.argv) > 3 else []
options = {"checkpoint_dir": sys.argv[1], "save_checkpoint_steps": 10, "hooks": hooks}
state = jstep.train(step, state, data, int(sys.argv[2]), **options)
print(jstep.global_step(state), float(state.params["w"].sum()))
"""
)
LOOP = (
    FIRST
    + """
with jstep.Run(step, state, data, 40, checkpoint_dir=sys.argv[1], log_steps=None) as run:
    first = run.step
    for n in run:
        if n == 20:
            pruned = jax.tree.map(lambda w: jnp.where(abs(w) < 0.5, 0, w), run.state.params)
            run.state = run.state.with_params(pruned)
print(first, run.step)
"""
)
BY_HAND = (
    FIRST
    + """
for n in range(3):
    state, metrics = step(state, *data[n])
with jstep.Saver(sys.argv[1]) as saver:
    saver.save(state)
    saver.wait()
    restored = saver.restore(state)
print(saver.all_steps(), bool((restored.params["w"] == state.params["w"]).all()))
try:
    jstep.train(step, state, data, 4, log_steps=7)
except ValueError as error:
    print(error)
"""
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A directory with the kernel, and nothing else of the package."""
    directory = tmp_path_factory.mktemp("alone")
    shutil.copytree(
        PACKAGE, directory / "jstep", ignore=shutil.ignore_patterns("__pycache__", *OTHERS)
    )
    return directory


def run(directory, program, *arguments):
    return python(
        "-c",
        program,
        *map(str, arguments),
        cwd=directory,
        PYTHONPATH=str(directory),
        JAX_PLATFORMS="cpu",
    )


def interrupt(directory, place, how):
    """Send a signal to README's first program while it waits behind step 25; return its exit
    code."""
    variables = os.environ | {"PYTHONPATH": str(directory), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRAIN, str(place), "50", "25"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables
    ) as process:
        try:
            assert process.stdout.readline() == b"waits\n"
            process.send_signal(how)
            return process.wait(60)
        finally:
            process.kill()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)]
)
def test_the_first_program_survives_a_signal(how, code, alone, tmp_path):
    assert interrupt(alone, tmp_path / "killed", how) == code
    resumed = run(alone, TRAIN, tmp_path / "killed", 50)
    assert resumed == run(alone, TRAIN, tmp_path / "whole", 50)
    assert resumed.split()[0] == "50"


@pytest.mark.thorough
def test_a_loop_and_a_save_by_hand(alone, tmp_path):
    assert run(alone, LOOP, tmp_path / "loop").split() == ["0", "40"]
    assert run(alone, LOOP, tmp_path / "loop").split()[0] == "40"
    saved, rejected = run(alone, BY_HAND, tmp_path / "by_hand").splitlines()
    assert saved == "[3] True"
    assert rejected.startswith("log_steps=7: nothing that is attached to this run uses it")


LEFT_OUT = re.compile(
    rf"\bjstep\.({'|'.join(OTHERS)})\b|from jstep import "
    rf"[^\n]*\b({'|'.join(OTHERS)})\b|__all__|logdir=|PAST|forked"
)


def needs_others(path, names):
    """Whether a file of tests names a room or a public name that is not the kernel's."""
    text = path.read_text()
    return bool(LEFT_OUT.search(text)) or any(
        re.search(rf"\bjstep\.{name}\b", text) for name in names
    )


@pytest.mark.thorough
@pytest.mark.parametrize("room", ["state", "optimizers", "training", "checkpoint"])
def test_the_tests_of_its_rooms_pass(room, alone):
    names = []
    for line in (PACKAGE / "__init__.py").read_text().splitlines():
        match = re.fullmatch(r"    (\w+)\.[\w.]+: (.+)", line)
        if match is not None and match[1] in OTHERS:
            names += match[2].split()
    assert "LoggingHook" in names
    files = [
        path
        for path in sorted((ROOT / "tests" / room).glob("test_*.py"))
        if not needs_others(path, names)
    ]
    assert len(files) >= 5
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    variables = os.environ | {"PYTHONPATH": str(alone), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:]


def without(room):
    """Return the rooms to delete with one that is not the kernel's: those that import it, and
    theirs."""
    gone = {room}
    while True:
        more = {package_of(module) for module, other in pairs() if package_of(other) in gone} - gone
        more &= OTHERS
        if not more:
            return gone
        gone |= more


@pytest.mark.thorough
@pytest.mark.parametrize("room", sorted(OTHERS))
def test_each_room_that_is_not_the_kernels_may_be_deleted(room, tmp_path):
    gone = without(room)
    assert not gone & KERNEL
    shutil.copytree(
        PACKAGE, tmp_path / "jstep", ignore=shutil.ignore_patterns("__pycache__", *gone)
    )
    for last_step in (10, 20):
        assert run(tmp_path, TRAIN, tmp_path / "run", last_step).split()[0] == str(last_step)
