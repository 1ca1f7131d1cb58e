"""`diff` of runs in separate processes: none between identical runs, and each planted difference by name."""

import forked
import pytest

from jstep.tools.cli import main

PROGRAM = """
import os, sys
directory, batches, variant = sys.argv[1:4]
import jax, jax.numpy as jnp, numpy as np
import jstep

rows, size = (80 if variant == "data" else 64), (16 if variant == "batch size" else 8)
dtype = jnp.bfloat16 if variant == "dtype" else jnp.float32
seed = 1 if variant == "seed" else 0
data = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
table = np.arange(12, dtype=np.float32).reshape(4, 3)

def function(step):
    return data[:size] + step

def generator():
    while True:
        yield data[:size]

class Rows:
    def __len__(self): return rows
    def __getitem__(self, i): return data[i]

class Loader:  # as torch's
    def __init__(self): self.dataset, self.batch_size, self.names = Rows(), size, {"a", "b", "c"}
    def __iter__(self): return iter([data[i : i + size] for i in range(0, rows, size)])
    def __len__(self): return rows // size

dataset = {
    "array": lambda: jstep.batches(data, size, seed=seed),
    "rows": lambda: jstep.batches(Rows(), size, seed=seed),
    "mixture": lambda: jstep.mixture({"a": data, "b": data[:16]}, size, weights={"a": 2, "b": 1}, seed=seed),
    "function": lambda: function, "generator": generator, "loader": Loader, "list": lambda: [data[:size]] * 9,
}[batches]()
if variant == "skip":
    dataset = dataset.skip(1, 3)
rate = 0.02 if variant == "rate" else 0.01
optimizer = jstep.gradient_descent(rate) if variant == "optimizer" else jstep.adam(rate)

def loss_fn(params, x):
    x = x.astype(dtype)
    x = jnp.tanh(x) if variant == "step" else x
    return jnp.mean((x @ params["w"] + jnp.mean(x @ table.astype(dtype))) ** 2)

params = {"w": jnp.ones((4, 2), dtype), **{name: jnp.zeros((), dtype) for name in {"alpha", "beta", "gamma"}}}
state = jstep.TrainState.create(params, optimizer)
step = jstep.minimize(loss_fn, optimizer)
hooks = [jstep.every(2, lambda step, state, metrics: None), jstep.AuditHook(every_n_steps=2)]
jstep.train(step, state, dataset, 4, hooks=hooks, checkpoint_dir=directory, logdir=os.path.join(directory, "log"),
            compile_cache=True, progress=False)
"""


@pytest.fixture
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def run(name, batches="array", variant="", **env):
        program = forked.start(PROGRAM, folder / name, batches, variant, env=env)
        return str(folder / name), program

    return run


def finish(*programs):
    for program in programs:
        _, errors = program.communicate(timeout=120)
        assert program.returncode == 0, errors[-3000:]


def difference(a, b, capsys):
    main(["diff", a, b])
    return capsys.readouterr().out.splitlines()


@pytest.mark.thorough
@pytest.mark.parametrize("batches", ["array", "rows", "mixture", "function", "generator", "loader", "list"])
def test_the_same_run_in_another_directory(runs, batches, capsys, tmp_path, monkeypatch):
    a, one = runs("a", batches)
    monkeypatch.chdir(tmp_path)
    b, other = runs("elsewhere/deep/b", batches, HOME=str(tmp_path), USER="somebody")
    finish(one, other)
    assert difference(a, b, capsys)[0] == "the cards of the last starts do not differ"


PLANTED = {
    "seed": "batches: seed: 0 in A, 1 in B",
    "rate": "step: learning_rate: 0.01 in A, 0.02 in B",
    "data": "batches: rows: 64 in A, 80 in B",
    "skip": "batches: steps: ",
    "batch size": "batches: batch_size: 8 in A, 16 in B",
    "dtype": "state: dtypes[bfloat16]: absent in A",
    "step": "step: the traced loss_fn (stage from step 0) differs: operations tanh (0 in A, 1 in B)",
    "optimizer": "state: slots: m, start_step, v only in A",
}


@pytest.mark.thorough
@pytest.mark.parametrize("variant", PLANTED)
def test_names_a_planted_difference(runs, variant, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (a, one), (b, other) = runs("a"), runs("b", variant=variant)
    finish(one, other)
    first, *lines = difference(a, b, capsys)
    assert first == "the cards of the last starts differ:"
    assert any(line.startswith("  " + PLANTED[variant]) for line in lines), lines
