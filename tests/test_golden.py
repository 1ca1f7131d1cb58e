"""Golden runs: what each release wrote is restored, continued and looked at by this version.

`dev/golden.py` wrote them, once for each release, and nothing writes them again. Hashes are of what
is restored: what the next steps give may depend on the version of JAX.
"""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import processes
import pytest
from golden_runs import RUNS

import jstep
from jstep.logs.history_file import read_rows
from jstep.look.cli import main

GOLDEN = pathlib.Path(__file__).with_name("golden")
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
FORMATS = pathlib.Path(__file__).with_name("formats.txt")
LAST_STEPS = {name: 8 if name == "branch" else 6 for name in RUNS}
"""The steps at which the runs ended."""


@pytest.fixture(params=VERSIONS)
def golden(request, tmp_path):
    """A copy of the golden runs of a release."""
    shutil.copytree(GOLDEN / request.param, tmp_path / "runs")
    for path in (tmp_path / "runs").glob("*/stalls/*.json"):
        # In a new clone it was written just now, as if its process, on another host, were still
        # waiting.
        os.utime(path, (0, 0))
    return tmp_path / "runs"


def hashes_of(tree):
    return {
        path: f"{a:08x}{b:08x}" for path, (a, b) in jstep.fingerprint(tree, per_leaf=True).items()
    }


def test_no_format_has_changed_since_the_newest_golden_runs():
    """Another format needs golden runs of its own, because the next release has to read it: see
    dev/README.md."""
    assert (GOLDEN / VERSIONS[-1] / "formats.txt").read_text() == FORMATS.read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_runs_are_small_and_say_nothing_of_the_machine(version):
    for run in RUNS:
        files = [path for path in (GOLDEN / version / run).rglob("*") if path.is_file()]
        assert 0 < sum(path.stat().st_size for path in files) <= 200_000
        for start in (GOLDEN / version / run / "starts").glob("model.00000?.json"):
            fields = json.loads(start.read_bytes())
            assert (fields["process"]["host"], fields["process"]["space"]) == ("golden", "golden")
            assert fields["directory"] in (f"/tmp/golden/{run}", "gs://bkt/run")
            assert fields["commit"] is None
            assert 1_767_225_000 < fields["began"] < 1_767_240_000
        for stall in (GOLDEN / version / run / "stalls").glob("*.json"):
            lines = [
                line
                for stack in json.loads(stall.read_bytes())["threads"].values()
                for line in stack
            ]
            assert all(line.startswith(("/jstep/", "/python/", "/tmp/golden/")) for line in lines)


def test_each_checkpoint_is_restored(golden):
    hashes = json.loads((golden / "hashes.json").read_text())
    assert {name.partition("/")[0] for name in hashes} == set(RUNS)
    for name, expected in hashes.items():
        prefix, step = os.path.basename(name).rsplit("-", 1)
        with jstep.Saver(golden / os.path.dirname(name), prefix) as saver:
            assert hashes_of(saver.restore(step=int(step))) == expected, name


@pytest.mark.thorough(except_for=[f"{VERSIONS[-1]}-everything", f"{VERSIONS[-1]}-from_loop"])
@pytest.mark.parametrize("name", [name for name in RUNS if name != "bucket"])
def test_each_run_is_continued(golden, name, caplog):
    caplog.set_level("INFO", "jstep")
    last_step = LAST_STEPS[name] + 2
    state = RUNS[name](str(golden / name), last_step)
    assert jstep.global_step(state) == last_step
    assert f"restored model-{last_step - 2}" in caplog.text
    assert "starts fresh" not in caplog.text
    assert "dropped" not in caplog.text
    for leaf in jax.tree.leaves(state.params):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


@pytest.mark.thorough
def test_the_positions_of_two_processes_are_restored(golden):
    """`set_state` of the loader checks that each process gets its own."""
    script = f"""
sys.path.insert(0, {str(GOLDEN.parent)!r})
import golden_runs
state = golden_runs.RUNS["odd_processes"](directory, 8)
print("step", jstep.global_step(state))
"""
    for lines in processes.run(script, 2, str(golden / "odd_processes")):
        assert processes.printed(lines, "step") == "8"


def test_hooks_and_positions_have_their_memory(golden):
    """What the states of hooks and of the loader were, besides the arrays."""
    with jstep.Saver(golden / "everything") as saver:
        extra = saver.extra()
    keys = [state["key"] for state in extra["hooks"]["states"]]
    assert keys == [
        *("EvaluationHook(eval)", "mine", "History", "History", "Counter", "counter"),
    ]
    RUNS["everything"](str(golden / "everything"), 8)
    rows = read_rows(str(golden / "everything" / "history.jsonl"))
    assert list(rows) == [2, 3, 4, 6, 8]
    with jstep.Saver(golden / "everything" / "best", "best") as saver:
        assert saver.latest_step() in (2, 4, 6, 8)


def test_the_commands_show_each_run(golden, capsys, tmp_path):
    def shown(*words):
        code = main([str(word) for word in words])
        found = capsys.readouterr()
        assert not found.err, found.err
        assert code == 0
        return found.out

    assert "unreadable" not in shown("runs", golden, "--starts")
    for name in RUNS:
        if name != "bucket":
            where = golden / name
            assert f"model-{LAST_STEPS[name]}" in shown("inspect", where)
            assert "productive" in shown("goodput", where)
            shown("stalls", where)
            shown("diff", where / f"model-{LAST_STEPS[name]}", where / f"model-{LAST_STEPS[name]}")
    shown("report", golden / "everything", "-o", tmp_path / "page.html")
    assert "eval/loss" in (tmp_path / "page.html").read_text()
    shown(
        "diff",
        golden / "everything" / "fingerprints.jsonl",
        golden / "everything" / "fingerprints.jsonl",
    )
