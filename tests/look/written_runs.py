"""Starts of runs as `train` records them, without training."""

import json
import os

import jstep
from jstep.record.starts import SETUP_VERSION, VERSION, path_of
from jstep.stores.owners import this_process

ELSEWHERE = {"host": "elsewhere", "space": "", "pid": 7, "started": "1"}
TIME = 1.7e9
PROGRAM = {
    "stage": 0,
    "batch": ["x: float32[2]"],
    "hyperparameters": {"learning_rate": 0.1},
    "hash": "0123456789",
}


def start(folder, number=1, prefix="model", **fields):
    """The fields of a start that took ten steps and is killed, unless `fields` say otherwise."""
    own = {
        "version": VERSION,
        "prefix": prefix,
        "number": number,
        "run": str(folder),
        "process": this_process() | {"pid": 2**30},
    }
    own |= {
        "began": TIME,
        "now": TIME + 10,
        "directory": str(folder),
        "last_step": 100,
        "config": {"lr": 0.1},
    }
    own |= {
        "devices": "1×cpu",
        "parameters": 3,
        "step": [0, 10],
        "seconds": {"starting": 1.0, "stepping": 9.0},
    }
    own |= {
        "values": {"loss": 0.5},
        "peak_bytes": 9,
        "mfu": 0.5,
        "commit": f"{'abc':40}",
        "end": ["finished", ""],
    }
    return own | {"argv": ["a"]} | fields


def make_setup(**fields):
    own = {
        "versions": {"jax": "0.10"},
        "environment": {"XLA_FLAGS": "--a=1"},
        "settings": {"jax_enable_x64": False},
    }
    own |= {
        "devices": {"kind": "cpu"},
        "state": {"hash": "1", "sharding": "2"},
        "batches": {"hash": "1", "seed": 0},
    }
    own |= {"stages": {"0": "step"}, "lanes": None, "arguments": {"last_step": 100}}
    return own | {"programs": [PROGRAM]} | fields


def write_start(folder, start, setup=None):
    """Write a start, or bytes in place of one, and its setup."""
    fields = start if isinstance(start, dict) else {"prefix": "model", "number": 1}
    path = path_of(str(folder), fields["prefix"] or "model", fields["number"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for name, value in (
        (path, start),
        (f"{path.removesuffix('.json')}.card.json", {"version": SETUP_VERSION, "card": setup}),
    ):
        if name == path or setup is not None:
            with open(name, "wb") as file:
                file.write(value if isinstance(value, bytes) else json.dumps(value).encode())


def write_run(folder, number=1, setup_fields=None, **fields):
    """Write a start and its setup; `fields` replace its own."""
    write_start(folder, start(folder, number, **fields), make_setup(**(setup_fields or {})))


def starts_of(folder, prefix="model"):
    """The starts that a run has recorded, as JSON."""
    names = sorted(
        name
        for name in os.listdir(folder / "starts")
        if name.endswith(".json") and ".card." not in name
    )
    return [
        json.loads((folder / "starts" / name).read_text())
        for name in names
        if name.startswith(f"{prefix}.")
    ]


def change(folder, number=1, prefix="model", **fields):
    """Replace fields of a recorded start."""
    path = path_of(str(folder), prefix, number)
    with open(path) as file:
        recorded = json.load(file)
    with open(path, "w") as file:
        json.dump(recorded | fields, file)


def write_checkpoint(folder):
    """Write a checkpoint, unless it is there, and return its path."""
    if not (folder / "best-10").exists():
        with jstep.Saver(folder, prefix="best", async_save=False) as saver:
            saver.save({"global_step": 10})
    return str(folder / "best-10")
