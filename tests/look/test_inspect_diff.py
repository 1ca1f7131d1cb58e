"""`inspect` shows the content of a checkpoint, and `diff` the step at which two runs diverge."""

import json
import os
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from written_runs import write_run

import jstep
from jstep.look.arrays import array_difference

OPTIMIZER = jstep.momentum(0.1, 0.9)


def strict(text):
    return json.loads(text, parse_constant=pytest.fail)


def state(step=0, **params):
    leaves = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "b": jnp.ones(2, jnp.bfloat16),
        "key": jax.random.key(1),
    } | params
    return jstep.TrainState.create(leaves, OPTIMIZER, global_step=step)


@pytest.fixture
def save(tmp_path):
    def save(name, *states, prefix="model", extra=None):
        with jstep.Saver(tmp_path / name, prefix=prefix, async_save=False) as saver:
            for one in states:
                path = saver.save(one, extra=extra)
        return os.path.dirname(path), path

    return save


def flip(path, offset):
    """Flip a bit in the largest file of a checkpoint."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    file = max((f for f in files if not f.endswith("manifest.json")), key=os.path.getsize)
    data = bytearray(pathlib.Path(file).read_bytes())
    data[offset] ^= 1
    pathlib.Path(file).write_bytes(data)


def test_inspect_a_checkpoint(save, cli):
    _, path = save("run", state(7), extra={"epoch": 3, "loss": None})
    assert 'extra {"epoch": 3, "loss": null}' in cli("inspect", path).out
    result = strict(cli("inspect", path, "--json", "--verify").out)
    assert (result["step"], result["extra"]["epoch"], result["sound"]) == (7, 3, True)
    leaves = {leaf["path"]: leaf for leaf in result["leaves"]}
    assert leaves["params/w"] == {
        "path": "params/w", "dtype": "float32", "shape": [2, 3], "bytes": 24, "min": 0.0,
        "max": 5.0, "mean": 2.5, "norm": pytest.approx(55**0.5), "nonfinite": 0,
    }  # fmt: skip
    assert leaves["params/key"]["dtype"].startswith("key")
    assert leaves["params/key"]["min"] is None
    assert leaves["global_step"]["max"] == 7


def test_leaves_that_share_a_path_have_names_of_their_own(save, cli):
    _, path = save(
        "run", {"a": {"b": 1.0}, "a/b": 2.0, "a/b#2": 3.0, "a/b#4": 4.0, "global_step": 0}
    )
    values = {
        leaf["path"]: leaf["max"] for leaf in strict(cli("inspect", path, "--json").out)["leaves"]
    }
    assert values == {"a/b": 1.0, "a/b#3": 2.0, "a/b#2": 3.0, "a/b#4": 4.0, "global_step": 0}


def test_inspect_a_directory_and_a_prefix_with_brackets(save, cli):
    directory, path = save("lr=[0.1]", state(3), prefix="m[a]")
    for where in (directory, path):
        assert "m[a]-3" in cli("inspect", where).out


def test_corruption_is_an_error(save, cli):
    directory, path = save("run", state(1), state(2, w=jnp.arange(5000.0)))
    flip(path, 1000)
    assert "model-2 is corrupted" in cli("inspect", path, "--verify", code=2).err
    assert "model-2" in cli("inspect", directory).out, "without --verify only sizes are compared"
    output = cli("inspect", directory, "--verify", code=2)
    assert "CORRUPTED" in output.out
    assert "model-2 is corrupted" in output.err
    found = strict(cli("inspect", path, "--verify", "--json", code=2).out)
    assert (found["path"], found["step"], found["sound"], len(found["problems"])) == (
        path,
        2,
        False,
        1,
    )
    cli("diff", path, path, code=2)
    with open(os.path.join(path, "manifest.json"), "r+b") as file:
        file.truncate(50)
    cli("inspect", path, code=2)
    assert "model-1" in cli("inspect", directory, code=2).out
    found = strict(cli("inspect", directory, "--verify", "--json", code=2).out)["checkpoints"]
    assert [(one["name"], one["sound"]) for one in found] == [("model-1", True), ("model-2", False)]


def test_the_summary_counts_what_the_rows_say(save, tmp_path, cli):
    directory, path = save("run", state(1), state(2, w=jnp.arange(5000.0)))
    sound = cli("inspect", directory, "--verify").out
    assert sound.endswith("every byte as it was written\n")
    flip(path, 1000)
    (tmp_path / "run/best").mkdir()
    shutil.copytree(f"{directory}/model-1", f"{directory}/best/acc-5")
    os.truncate(f"{directory}/best/acc-5/manifest.json", 50)
    shutil.copytree(f"{directory}/model-1", f"{directory}/model-3")
    *rows, summary = cli("inspect", directory, "--verify", code=2).out.splitlines()
    assert [(row.split()[0], row.split()[-1]) for row in rows[1:]] == [
        ("model-1", "written"),
        ("model-2", "CORRUPTED"),
        ("model-3", "UNUSABLE"),  # intact, under a wrong name
        ("best/acc-5", "CORRUPTED"),
    ]
    assert summary == "2 of 4 are CORRUPTED; 1 of 4 is UNUSABLE"
    lines = cli("inspect", directory, code=2).out.splitlines()
    assert lines[-2:] == [
        "1 of 4 is CORRUPTED; 1 of 4 is UNUSABLE",
        "sizes only (--verify reads every byte)",
    ]


@pytest.mark.parametrize("name", ["d", "manifest.ocdbt", "_METADATA"])
def test_what_cannot_be_read_is_not_called_corrupted(name, cli):
    with tempfile.TemporaryDirectory() as directory:  # other users cannot access tmp_path
        os.chmod(directory, 0o755)
        with jstep.Saver(directory, async_save=False) as saver:
            saver.save(state(1))
            path = saver.save(state(2))
        cli("inspect", directory, "--verify")  # what it imports may not be readable for others
        os.chmod(os.path.join(path, name), 0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            listed = cli("inspect", directory, "--verify", code=2)
            single = strict(cli("inspect", path, "--verify", "--json", code=2).out)
        finally:
            if is_root:
                os.seteuid(0)
            os.chmod(os.path.join(path, name), 0o755)
    assert listed.out.splitlines()[-1] == "1 of 2 is UNUSABLE"
    assert "model-2 cannot be verified: " in listed.err
    assert "corrupted" not in listed.err
    assert single["sound"] is False
    assert "Permission denied" in single["problems"][0]


def test_sizes_are_always_compared(save, cli):
    directory, path = save("run", state(1), state(2))
    os.truncate(os.path.join(path, "manifest.ocdbt"), 3)
    said = "model-2 is corrupted: "
    for where in (path, directory):
        output = cli("inspect", where, code=2)
        assert (said in output.err, "manifest.ocdbt: 3 bytes instead of" in output.err) == (
            True,
            True,
        )
    checkpoints = strict(cli("inspect", directory, "--json", code=2).out)["checkpoints"]
    assert [one["name"] for one in checkpoints] == ["model-1", "model-2"]


def test_several_paths(save, tmp_path, cli):
    directory, path = save("run", state(1), state(2))
    out = cli("inspect", directory, path).out
    assert out.startswith(f"{directory}\ncheckpoint")
    assert f"\n\n{path}\nstep 2" in out
    output = cli("inspect", path, tmp_path / "nowhere", f"{directory}/model-1", "--json", code=2)
    assert [strict(line)["step"] for line in output.out.splitlines()] == [2, 1]
    assert "no checkpoint or directory of checkpoints" in output.err


def test_a_directory_of_runs_is_called_so(tmp_path, cli):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    message = cli("inspect", tmp_path / "runs", code=2).err
    assert "is a directory of runs (a, b): `jstep runs " in message
    assert "no checkpoints in" in cli("inspect", tmp_path / "runs" / "a", code=2).err


@pytest.mark.parametrize("command", [["inspect", "{}"], ["diff", "{}", "{}"]])
@pytest.mark.parametrize("name", ["missing", "empty", "file", "fifo"])
def test_error_if_there_is_no_checkpoint(tmp_path, cli, command, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x\n")
    os.mkfifo(tmp_path / "fifo")
    output = cli(*(word.format(tmp_path / name) for word in command), code=2)
    assert output.out == ""
    assert str(tmp_path / name) in output.err
    assert output.err.count("\n") == 1


def test_a_renamed_checkpoint_is_an_error(save, cli):
    directory, path = save("run", state(1))
    os.rename(path, path[:-1] + "9")
    assert (
        "its name says step 9, and it holds step 1" in cli("inspect", path[:-1] + "9", code=2).err
    )
    cli("inspect", directory, code=2)


def test_diff_of_directories(save, cli):
    a, _ = save("a", state(1), state(2), state(4), state(5))
    b, _ = save("b", state(2), state(4, w=jnp.zeros((2, 3))), state(5, w=jnp.ones((2, 3))))
    result = strict(cli("diff", a, b, "--json", code=1).out)
    assert (result["step"], [leaf["path"] for leaf in result["leaves"]]) == (4, ["params/w"])
    c, _ = save("c", state(7))
    assert "no step in common" in cli("diff", a, c, code=2).err
    d, _ = save("d", state(4), prefix="other")
    cli("diff", a, d)


def entry(step, **leaves):
    hexes = {path: f"{value:016x}" for path, value in leaves.items()}
    return (
        json.dumps({"step": step, "state": f"{sum(leaves.values()):016x}", "leaves": hexes}) + "\n"
    )


def test_diff_of_fingerprint_logs(tmp_path, cli):
    a, b = tmp_path / "a.jsonl", tmp_path / "logdir" / "fingerprints.jsonl"
    b.parent.mkdir()
    a.write_text("".join(entry(step, w=step, b=7) for step in range(2, 20, 2)))
    b.write_text("".join(entry(step, w=step + (step >= 9), b=7) for step in range(3, 20, 3)))
    cli("diff", a, a)
    out = cli("diff", a, b.parent, code=1).out
    assert "the runs diverge at step 12, number 2 of 3 common steps" in out
    assert "\n  w\n" in out
    assert strict(cli("diff", a, b, "--json", code=1).out)["step"] == 12


def test_the_last_line_of_a_step_counts(tmp_path, cli):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text(entry(2, w=1) + entry(4, w=2))
    b.write_text(entry(2, w=1) + entry(4, w=9) + entry(4, w=2))
    cli("diff", a, b)


def test_incomplete_and_invalid_logs(tmp_path, cli):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text(entry(2, w=1) + entry(4, w=2))
    b.write_text(entry(3, w=1))
    assert "no step in common" in cli("diff", a, b, code=2).err
    b.write_text('{"step": 2, "state"\n' + entry(4, w=2))
    assert "line 1 is not a fingerprint" in cli("diff", a, b, code=2).err
    b.write_text("notes")
    assert "has no complete line of a FingerprintHook" in cli("diff", a, b, code=2).err
    b.write_text(entry(2, w=1) + entry(4, w=3)[:-9])  # the run is still writing, or was killed
    cli("diff", a, b)
    b.write_text(json.dumps({"step": 2, "state": "f" * 16}) + "\n")
    assert "per_leaf=False" in cli("diff", a, b, code=1).out
    b.write_text(entry(2, v=1, w=0))
    cli("diff", a, b)  # the sum over all leaves is the same, and it decides
    b.write_text(entry(2, v=5))
    assert "  w  only in A\n  v  only in B\n" in cli("diff", a, b, code=1).out


def test_diff_of_two_kinds_is_an_error(save, tmp_path, cli):
    directory, path = save("run", state(1))
    (tmp_path / "log").write_text(entry(1, w=1))
    assert "pass two of the same kind" in cli("diff", path, directory, code=2).err
    cli("diff", directory, tmp_path / "log", code=2)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"])
def test_units_in_the_last_place(name):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    unsigned = f"u{dtype.itemsize}"
    one = np.ones(3, dtype)
    other = one.copy()
    other.view(unsigned)[1] += 5
    assert array_difference("x", one, other).max_ulps == 5
    assert array_difference("x", one, one) is None
    zeros = array_difference("x", np.zeros(1, dtype), -np.zeros(1, dtype))
    assert (zeros.number, zeros.max_ulps, zeros.max_abs) == (1, 0, 0.0)
    least = np.zeros(1, dtype)
    least.view(unsigned)[0] = 1
    assert array_difference("x", least, -least).max_ulps == 2
    assert array_difference("x", np.full(1, np.nan, dtype), one[:1]).max_ulps is None


@pytest.mark.parametrize(
    ("name", "a", "b", "ulps"),
    [
        ("float4_e2m1fn", -0.5, 0.5, 2),
        ("float6_e2m3fn", -0.5, 0.5, 8),
        ("float6_e3m2fn", -0.5, 0.5, 16),
        ("float8_e8m0fnu", 0.5, 4.0, 3),
    ],
)
def test_units_in_the_last_place_without_a_sign_in_the_highest_bit(name, a, b, ulps):
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert array_difference("x", np.full(1, a, dtype), np.full(1, b, dtype)).max_ulps == ulps
    assert array_difference("x", np.full(1, b, dtype), np.full(1, a, dtype)).max_ulps == ulps


def test_names_are_escaped_for_the_terminal(save, cli):
    directory, path = save("run", state(1, **{"\x1b[31mred": jnp.ones(1)}))
    for arguments in (["inspect", path], ["inspect", directory]):
        assert "\x1b" not in cli(*arguments).out


def test_left_out_leaves(tmp_path, cli):
    def save(name, leave_out, **params):
        with jstep.Saver(tmp_path / name, leave_out=leave_out, async_save=False) as saver:
            return saver.save(state(3, **params))

    adapters, complete, other = (
        save("a", ["w", "key"]),
        save("b", None),
        save("c", "w", w=jnp.ones((2, 3))),
    )
    out = cli("inspect", adapters, "--verify").out
    lines = out[out.index("left out") :].splitlines()
    fingerprint_of_w = "".join(
        f"{int(word):08x}" for word in jstep.fingerprint(state(3), per_leaf=True)["params/w"]
    )
    assert ["params/w", "float32", "[2,3]", fingerprint_of_w] in [line.split() for line in lines]
    result = strict(cli("inspect", adapters, "--json").out)
    assert [leaf["path"] for leaf in result["left_out"]] == [
        "params/key",
        "params/w",
        "slots/momentum/w",
    ]
    assert "left_out" not in strict(cli("inspect", complete, "--json").out)

    assert "identical (6 leaves, bitwise)" in cli("diff", adapters, adapters).out
    both = save("g", ["w", "key"], w=jnp.ones((2, 3)))
    out = cli("diff", adapters, both, code=1).out
    assert "1 of 6 leaves differ" in out
    assert ["params/w", "the", "fingerprint,", "left", "out", "of", "both"] in [
        line.split() for line in out.splitlines()
    ]

    narrow, saved = (
        save(name, out, w=jnp.ones((2, 3), jnp.bfloat16)) for name, out in (("d", "w"), ("e", None))
    )
    more = save("f", "new", new=jnp.ones(1))
    assert (
        "float32[2, 3] in A, bfloat16[2, 3] in B, left out of both"
        in cli("diff", other, narrow, code=1).out
    )
    assert "float32 in A, bfloat16 in B" in cli("diff", complete, saved, code=1).out
    assert "left out of B only" in cli("diff", complete, more, code=1).out
    assert "left out of A only" in cli("diff", more, complete, code=1).out


def test_a_checkpoint_whose_successor_never_took_its_place_is_found(save, cli, tmp_path):
    """A kill came between the two renames of a save, so that the old one of its step has the
    suffix."""
    directory, path = save("run", state(3))
    os.rename(path, f"{path}.jstep-replaced")
    found = jstep.latest_checkpoint(directory)
    assert found == f"{path}.jstep-replaced"
    assert "model-3" in cli("inspect", directory).out
    assert json.loads(cli("inspect", "--json", found).out)["step"] == 3
    other, _ = save("other", state(3))
    cli("diff", directory, other)
    loss = jstep.minimize(lambda params, x: jnp.sum(params["w"] ** 2) * x, OPTIMIZER)
    branch = jstep.train(
        loss, state(), lambda step: jnp.float32(0), 4, start_from=found,
        checkpoint_dir=tmp_path / "branch", logdir=tmp_path / "branch", save_summaries_steps=1,
        progress=False,
    )  # fmt: skip
    assert jstep.global_step(branch) == 4

    os.rename(tmp_path / "branch/model-4", tmp_path / "branch/model-4.jstep-replaced")
    head, row = cli("runs", tmp_path / "branch").out.splitlines()[:2]
    assert dict(zip(head.split(), row.replace(" @3", "@3").split(), strict=False))["saved"] == "4"
    assert "<title>checkpoint 4</title>" in jstep.report(tmp_path / "branch").html
