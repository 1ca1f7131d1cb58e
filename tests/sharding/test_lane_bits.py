"""In lanes, states and metrics have the same bits on any number of devices, in any layout.

Runs are in another process, with XLA's default optimizations; see `lane_runs.py`.
"""

import functools
import json

import pytest
from lane_runs import differing, digests, main
from optimizer_table import TABLE
from processes import start, wait_for

KINDS = ("dp", "zero1", "fsdp")
PLACES = [
    f"{kind}:{n}:{axes}" for axes in ("auto", "explicit") for kind in KINDS for n in (1, 2, 4, 8)
]
FEW = ["none", "dp:2", "zero1:4:explicit", "fsdp:8"]


def assert_equal(*cases, timeout=900):
    for case, found in zip(cases, digests(*cases, timeout=timeout), strict=True):
        assert not differing(found), json.dumps(case)


@pytest.mark.thorough(except_for=["8"])
@pytest.mark.parametrize("lanes", [8, None])
def test_on_one_device_and_on_eight(lanes):
    """In this process, with fewer optimizations; the control without lanes differs, so that this
    test can fail."""
    case = {
        "model": "tiny",
        "optimizer": "momentum",
        "options": {"lanes": lanes, "metrics": ["grad_norm"]},
        "steps": 1,
    }
    (found,) = main([case | {"places": ["none", "fsdp:8:explicit"]}])
    assert bool(differing(found)) == (lanes is None)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["mlp", "transformer", "conv"])
def test_every_layout(model, dtype):
    """20 steps: no mesh, data parallel, ZeRO-1, FSDP on 1 to 8 devices, and rows on two mesh
    axes."""
    optimizer = "adamw" if dtype == "float32" else "master"
    options = {} if model == "conv" else {"rng": True}
    places = ["none", *PLACES, "two:8", "two:4:explicit"]
    case = {
        "model": model,
        "dtype": dtype,
        "optimizer": optimizer,
        "steps": 20,
        "options": options,
        "places": places,
    }
    assert_equal(case)


OPTIONS = {
    "microbatches": {"num_microbatches": 2, "rng": True},
    "aux": {"has_aux": True},
    "weights": {"weighted": True},
    "sharpness": {"sharpness": 0.05, "adaptive": True},
    "max_rows": {"max_rows_per_device": 1},
    "several losses": {"several": True, "has_aux": True, "rng": True},
    "var_list": {"var_list": "deep/*"},
    "more lanes than devices": {"lanes": 32},
    "everything": {
        "num_microbatches": 2,
        "weighted": True,
        "has_aux": True,
        "sharpness": 0.05,
        "rng": True,
    },
}
OPTIMIZERS = {
    "averages": {"use_averages": True},
    "noise": {"metrics": ["noise_scale", "grad_norm"]},
    **{name: {} for name in ("users", "optax", "lbfgs", "compact")},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name):
    assert_equal({"options": OPTIONS[name], "places": [*FEW, "two:8"]})


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrappers_and_foreign_optimizers(name):
    assert_equal(
        {
            "optimizer": name,
            "steps": 6,
            "options": OPTIMIZERS[name],
            "places": [*FEW, "fsdp:8:explicit"],
        }
    )


@functools.lru_cache(maxsize=1)
def digests_of_optimizers(names):
    cases = [
        {"optimizer": f"table/{name}", "steps": 3, "places": ["none", "fsdp:8"]} for name in names
    ]
    return dict(zip(names, digests(*cases, timeout=900), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", TABLE)
def test_every_optimizer(name):
    """FSDP on eight devices against one device."""
    # Five in one process, whose start takes as long as an optimizer: JAX, models and their data.
    names = list(TABLE)
    begin = names.index(name) // 5 * 5
    found = digests_of_optimizers(tuple(names[begin : begin + 5]))[name]
    assert not differing(found), name


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}], ids=["plain", "microbatches"])
def test_runs_that_are_cut_and_continued_elsewhere(options):
    """The states and the logs of fingerprints, with 1, 3 and "auto" steps per call, which is
    another program."""
    runs = {
        "one device": [["none", 1, 12]],
        "three steps a call": [["none", 3, 12]],
        "eight": [["dp:8", 3, 12]],
        "cut": [["zero1:4", 3, 5], ["fsdp:2:explicit", "auto", 9], ["none", 3, 12]],
        "auto": [["fsdp:8:explicit", "auto", 7], ["dp:2", "auto", 12]],
        "single": [["dp:4:explicit", 1, 5], ["fsdp:8", 1, 12]],
    }
    assert_equal({"runs": runs, "options": options})


SCRIPT = """
import hashlib
step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm",), lanes=8)
for layout in ("none", "data", "zero1", "fsdp") if count == 1 else ("data", "zero1", "fsdp"):
    given, sharding = jstep.TrainState.create(init(), optimizer), None  # the same initial bits
    if layout != "none":
        specs = jstep.fsdp_specs(jax.eval_shape(init), mesh, min_size=1) if layout == "fsdp" else None
        slot_axis = "data" if layout == "zero1" else None
        given = jstep.shard_state(given, mesh, specs, slot_axis=slot_axis)
        sharding = rows
    options = {"steps_per_call": 3, "batch_sharding": sharding, "progress": False}
    state = jstep.train(step, given, batches, last_step=10, **options)
    if layout == "none":
        state = jstep.shard_state(state, mesh)
    if layout != "none":
        metrics = lambda params, x: {"loss": loss_fn(params, x), "each": jnp.sum(x @ params["w"], axis=1)}
        sets = jstep.batches(data[:72], 16, shuffle=False, num_epochs=1, drop_remainder=False)
        found = jstep.evaluator(metrics, sets, lanes=8, batch_sharding=rows)(state)
        print("evaluated", found["loss"].hex(), found["each"].hex())
    print("bits", hashlib.md5(weights(state).encode()).hexdigest())
"""  # noqa: E501


@pytest.mark.thorough
def test_two_processes(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    found = []
    for count in (1, 2):
        done = wait_for(start(SCRIPT, count, "unused"), timeout=300)
        assert all(one.code == 0 for one in done), done[0].err
        found += [
            line for line in done[0].out.splitlines() if line.startswith(("bits", "evaluated"))
        ]
    assert len(found) == 13
    assert len(set(found)) == 2
