"""`diff` first lists the differences between two runs, or between the starts of one."""

import json
import re

import jax.numpy as jnp
import pytest
from written_runs import PROGRAM, make_setup, start, write_start

import jstep

OPTIMIZER = jstep.gradient_descent(0.1)


def batches(seed):
    return {"batches": {"hash": str(seed), "kind": "Batches", "rows": 64, "seed": seed}}


@pytest.fixture
def run(tmp_path):
    def run(name, *setups, value=1.0, **fields):
        with jstep.Saver(tmp_path / name, async_save=False) as saver:
            saver.save(jstep.TrainState.create({"w": jnp.full(2, value)}, OPTIMIZER, global_step=3))
        for number, start_setup in enumerate(setups, 1):
            span = [10 * (number - 1), 10 * number]
            write_start(
                tmp_path / name, start(tmp_path / name, number, step=span, **fields), start_setup
            )
        return str(tmp_path / name)

    return run


def test_the_last_starts_are_compared_first(run, cli):
    a, b = (
        run("a", make_setup(**batches(7)), make_setup(**batches(0))),
        run("b", make_setup(**batches(1)), value=2.0),
    )
    first, second, third, *_ = cli("diff", a, b, code=1).out.splitlines()
    assert (first, second) == ("the last starts differ:", "  batches: seed: 0 in A, 1 in B")
    assert third.startswith("the runs diverge at step 3")
    assert json.loads(cli("diff", a, b, "--json", code=1).out)["starts"] == [
        "batches: seed: 0 in A, 1 in B"
    ]


@pytest.mark.parametrize(("seed", "message"), [(1, "differ:"), (0, "do not differ")])
def test_the_exit_code_depends_only_on_the_leaves(run, cli, seed, message):
    a, b = run("a", make_setup(**batches(0))), run("b", make_setup(**batches(seed)))
    for below in ("", "/model-3"):
        assert f"the last starts {message}" in cli("diff", f"{a}{below}", f"{b}{below}").out


def test_without_a_record_nothing_is_printed(run, cli):
    a, b = run("a"), run("b", make_setup())
    assert cli("diff", a, b).out == "identical at all common steps (1, from 3 to 3)\n"


def test_the_starts_of_one_run_are_compared(run, tmp_path, cli):
    """Later stages, the number of steps, and hooks do not count."""

    def of(rate, **more):
        return make_setup(programs=[PROGRAM | {"hyperparameters": {"learning_rate": rate}}], **more)

    a = run("a", of(0.1), of(0.2), of(0.2), of(0.2, versions={"jax": "0.11"}), of(0.2), None)
    write_start(tmp_path / "a", start(tmp_path / "a", 5, step=5))
    found = [re.sub(r"^[\d-]+ [\d:]+, ", "", line) for line in cli("diff", a).out.splitlines()]
    assert found == [
        "from step 0: the first start",
        "from step 10: changed since the previous start:",
        "  learning_rate: 0.1 before, 0.2 now",
        "from step 20: nothing has changed",
        "from step 30: changed since the previous start:",
        "  jax: 0.10 before, 0.11 now",
        "its start 5 has step=5, which is not valid",
        "its start 6 has no setup file: what it was given is not known",
        "not compared: files and data",
    ]
    starts = json.loads(cli("diff", a, "--json").out)["starts"]
    assert [one["changes"] for one in starts][1:3] == [["learning_rate: 0.1 before, 0.2 now"], []]


def test_a_start_without_steps_hides_no_change(run, cli):
    """It has no programs: the start after it is compared with those before."""
    a, b = (
        make_setup(programs=[PROGRAM | {"hyperparameters": {"learning_rate": rate}}])
        for rate in (0.1, 0.2)
    )
    out = cli("diff", run("a", a, make_setup(programs=[]), b), "--json").out
    starts = json.loads(out)["starts"]
    assert [one["changes"] for one in starts] == [None, [], ["learning_rate: 0.1 before, 0.2 now"]]


def test_a_run_without_a_record_is_an_error(run, cli):
    assert "no run is there" in cli("diff", run("a"), code=2).err


def test_starts_without_setups_are_lines(run, cli):
    assert "its start 1 has no setup file" in cli("diff", run("a", None)).out


def test_a_record_behind_a_link_is_none_for_any_command(run, tmp_path, cli):
    run("a", make_setup())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "starts").symlink_to(tmp_path / "a" / "starts")
    for command in ("runs", "report", "goodput", "diff", "stalls"):
        assert "no run is there" in cli(command, tmp_path / "b", code=2).err
