"""`diff` of identical runs in separate processes finds no difference."""

import forked
import pytest

from jstep.tools.cli import main

PROGRAM = """
import os, sys
directory, batches = sys.argv[1:3]
import jax, jax.numpy as jnp, numpy as np
import jstep

rows, size = 64, 8
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
    "array": lambda: jstep.batches(data, size, seed=0),
    "rows": lambda: jstep.batches(Rows(), size, seed=0),
    "mixture": lambda: jstep.mixture({"a": data, "b": data[:16]}, size, weights={"a": 2, "b": 1}, seed=0),
    "function": lambda: function, "generator": generator, "loader": Loader, "list": lambda: [data[:size]] * 9,
}[batches]()
optimizer = jstep.adam(0.01)

def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + jnp.mean(x @ table)) ** 2)

params = {"w": jnp.ones((4, 2)), **{name: jnp.zeros(()) for name in {"alpha", "beta", "gamma"}}}
state = jstep.TrainState.create(params, optimizer)
step = jstep.minimize(loss_fn, optimizer)
hooks = [jstep.every(2, lambda step, state, metrics: None), jstep.AuditHook(every_n_steps=2)]
jstep.train(step, state, dataset, 4, hooks=hooks, checkpoint_dir=directory, logdir=os.path.join(directory, "log"),
            compile_cache=True, progress=False)
"""


@pytest.fixture
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def run(name, batches, **env):
        program = forked.start(PROGRAM, folder / name, batches, env=env)
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
