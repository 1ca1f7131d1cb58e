"""Loaders of other packages: a run that is killed and resumed in a new process continues with the
next batch."""

import importlib.util
import signal

import forked
import processes
import pytest

PROGRAM = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
kind, directory, die_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
import jax.numpy as jnp, numpy as np, jstep

def torchdata(workers):
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader
    torch.manual_seed(0)
    rows = [np.float32(n) for n in range(96)]
    options = {"multiprocessing_context": "fork"} if workers else {}
    return StatefulDataLoader(rows, batch_size=4, shuffle=True, num_workers=workers, collate_fn=np.stack, **options)

def nodes():
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper
    return Loader(Mapper(Batcher(IterableWrapper(range(96)), 4), lambda rows: np.asarray(rows, np.float32)))

def datasets():
    import datasets
    rows = datasets.Dataset.from_dict({"x": [float(n) for n in range(96)]}).to_iterable_dataset(num_shards=3)
    return rows.with_format("numpy").batch(4)

def grain():
    import grain
    rows = grain.MapDataset.source([np.float32(n) for n in range(96)])
    return iter(rows.shuffle(seed=0).repeat().batch(4).to_iter_dataset())

KINDS = {"torchdata": lambda: torchdata(0), "torchdata, two workers": lambda: torchdata(2), "torchdata.nodes": nodes,
         "datasets": datasets, "grain": grain}

def loss_fn(params, batch):
    x = batch["x"] if isinstance(batch, dict) else batch
    return jnp.mean((params["w"] - jnp.float32(x)) ** 2), {"rows": x}

class Hook(jstep.Hook):
    def after_step(self, step, state, metrics):
        print("step", step, *map(int, metrics["rows"]), flush=True)
        if step == 10:
            saver.wait()
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

optimizer = jstep.gradient_descent(0.1)
step = jstep.minimize(loss_fn, optimizer, has_aux=True)
state = jstep.TrainState.create({"w": jnp.float32(0)}, optimizer)
saver = jstep.Saver(directory, async_save=False)
jstep.train(
    step, state, KINDS[kind](), 20, hooks=[Hook()], checkpoint_dir=saver, save_checkpoint_steps=5, progress=False
)
"""  # noqa: E501


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", ["torchdata", "torchdata, two workers", "torchdata.nodes", "datasets", "grain"]
)
def test_killed_and_resumed(tmp_path, kind):
    package = kind.partition(",")[0].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")

    def run_program(where, die_at):
        (completed,) = processes.wait_for(
            [forked.start(PROGRAM, kind, tmp_path / where, die_at)], timeout=100
        )
        return completed

    uninterrupted = run_program("uninterrupted", -1)
    assert uninterrupted.code == 0, uninterrupted.err[-3000:]
    lines = uninterrupted.out.splitlines()
    assert len(lines) == 20
    killed = run_program("killed", 13)
    assert killed.code == -signal.SIGKILL, killed.err[-3000:]
    assert killed.out.splitlines() == lines[:13]
    resumed = run_program("killed", -1)
    assert resumed.code == 0, resumed.err[-3000:]
    assert resumed.out.splitlines() == lines[10:]
    assert "no position" not in resumed.err
