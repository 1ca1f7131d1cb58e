"""Weights of several processes: each reads its own part, the first one writes, and an error reaches all."""

import os

import numpy as np
from processes import run
from safetensors_files import single

import jstep

SCRIPT = """
from jstep.weights import read
count_of = []
fill = read._fill
def counting(file, view, start, tensor):
    count_of.append(view.nbytes)
    fill(file, view, start, tensor)
read._fill = counting

for kind in jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    shapes = {
        name: jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, spec in {"rows": P("data"), "columns": P(None, "data"), "whole": P()}.items()
    }
    count_of.clear()
    params = jstep.load_weights(directory + "/in.safetensors", shapes)
    print("said", sum(count_of))
    assert all(leaf.sharding == shapes[name].sharding for name, leaf in params.items())
    params["host"] = np.arange(3)
    name = str(kind).split(".")[-1]
    mine = directory if process == 0 else directory + "/elsewhere"
    names = {"columns": ("t", np.transpose), "rows": "r"}
    jstep.save_weights(f"{mine}/{name}.safetensors", params, names, max_shard_bytes=200)
try:
    jstep.save_weights(f"{directory}/in.safetensors/no/folder", params)
except OSError:
    print("said mine")
except RuntimeError as error:
    print("said", error)
try:
    jstep.save_weights(f"{directory}/x", params, {"columns": ("t", lambda x: x[: int(x[1, 1])])})
except ValueError:
    print("said mine")
except RuntimeError as error:
    print("said", error)
"""


def test_two_processes(tmp_path):
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    single(tmp_path / "in.safetensors", rows=w, columns=w + 1, whole=w + 2)
    # XLA prints lines of its own.
    said = [
        [line.removeprefix("said ") for line in lines if line.startswith("said ")] for lines in run(SCRIPT, 2, tmp_path)
    ]
    first, second = said
    assert first[:2] == second[:2] == ["256", "256"]  # half of two tensors, and the third
    assert first[2:4] == ["mine", "mine"]
    assert all("process 0 could not save" in line for line in second[2:4])
    assert sorted(os.listdir(tmp_path))[:4] == [
        "Auto-00001-of-00003.safetensors",
        "Auto-00002-of-00003.safetensors",
        "Auto-00003-of-00003.safetensors",
        "Auto.safetensors.index.json",
    ]
    assert "elsewhere" not in os.listdir(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    for kind in ("Auto", "Explicit"):
        target = {"r": w, "t": w.T, "whole": w, "host": np.arange(3)}
        loaded = jstep.load_weights(tmp_path / f"{kind}.safetensors", target)
        for name, expected in {"r": w, "t": (w + 1).T, "whole": w + 2, "host": np.arange(3)}.items():
            np.testing.assert_array_equal(loaded[name], expected)
