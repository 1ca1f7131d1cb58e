"""`rows`: the rows of a step, and the steps of a row, from the folder of a run alone."""

import itertools
import json
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from written_runs import TIME, card_line, start_line, times_line, write_lines, write_run

import jstep
from jstep.tools.cli import main

DATA, SOURCES = np.arange(23), {"web": np.arange(11), "a:b": np.arange(7)}
OPTIMIZER = jstep.sgd(0.1)
STEP = jstep.minimize(lambda params, x: jnp.sum(params["w"] * x.astype(jnp.float32)), OPTIMIZER)
THIRDS = {0: {"web": 1.0, "a:b": 2.0}, 20: {"web": 0.1, "a:b": 0.3}}


def train(batches: Any, last: int, where: Any, **options: Any) -> None:
    state = jstep.TrainState.create({"w": jnp.ones(())}, OPTIMIZER)
    jstep.train(STEP, state, batches, last, checkpoint_dir=where, progress=False, **options)


def ask(cli: Any, *arguments: Any, code: int = 0) -> Any:
    return json.loads(cli("rows", *arguments, "--json", code=code).out)


def check(cli: Any, run: Any, first: int, stop: int, of: Any, numbers: Any) -> None:
    """Compare all answers with the batches that the run had at each step."""
    expected = {step: of(step).rows_of(step) for step in range(first, stop)}
    for step, rows in expected.items():
        found = ask(cli, run, "--step", step)
        texts = [f"{row[0]}:{row[1]}" if isinstance(row, tuple) else int(row) for row in rows]
        assert found == {"step": step, "rows": texts}
    for row in numbers:
        steps = [
            step for step, rows in expected.items() if row in [row[1] if len(np.shape(row)) else row for row in rows]
        ]
        assert ask(cli, run, "--row", row) == {"row": row, "steps": steps}


@pytest.mark.thorough
def test_each_start_has_its_own_definition(tmp_path: Any, cli: Any) -> None:
    """The seed, the batch size and the skips change at a step; a mixture and a branch follow."""
    one = jstep.batches(DATA, 4, seed=3)
    two = jstep.batches(DATA, {0: 4, 12: 5}, seed=4, drop_remainder=False).skip(3, 13)
    mix = jstep.mixture(SOURCES, 6, THIRDS, seed=1).skip(2, 20)
    train(one, 6, tmp_path / "run")
    train(two, 14, tmp_path / "run")
    train(mix, 18, tmp_path / "branch", start_from=tmp_path / "run")
    check(cli, tmp_path / "run", 0, 14, lambda step: one if step < 6 else two, (0, 7, 22))
    for step, data in {2: one, 9: two}.items():
        assert ask(cli, tmp_path / "branch", "--step", step)["rows"] == data.rows_of(step).tolist()
    texts = [f"{source}:{row}" for source, row in mix.rows_of(16)]
    assert ask(cli, tmp_path / "branch", "--step", 16)["rows"] == texts
    steps = mix.steps_of("a:b", 3, 14, 18)
    assert ask(cli, tmp_path / "branch", "--row", "a:b:3", "--from", 14) == {"row": "a:b:3", "steps": steps}
    found = cli("rows", tmp_path / "branch", "--row", "a:b:3", "--json", code=2)  # what is known is told
    assert json.loads(found.out)["steps"] == steps
    assert "must be the number of a row, in steps 0 to 5" in found.err
    (tmp_path / "run").rename(tmp_path / "renamed")
    assert ask(cli, tmp_path / "branch", "--step", 3)["rows"] == one.rows_of(3).tolist()
    shutil.rmtree(tmp_path / "renamed")
    missing = cli("rows", tmp_path / "branch", "--step", 3, code=2).err
    assert "step 3: the rows are not known: they are those of" in missing


# Timelines without training.


def test_rows_and_sources_that_came_at_a_restart(tmp_path: Any, cli: Any) -> None:
    grown = [{"web": np.arange(5)}, {"web": np.arange(5), "new": np.arange(9)}]
    mixes = [jstep.mixture(sources, 4, dict.fromkeys(sources, 1.0)) for sources in grown]
    starts = [of_start(f"{i}", 10 * i, 10 * i + 10, mix, 10.0 * i) for i, mix in enumerate(mixes)]
    write_lines(tmp_path / "run", *(line for lines in starts for line in lines))
    steps = mixes[1].steps_of("new", 7, 10, 20)
    assert ask(cli, tmp_path / "run", "--row", "new:7") == {"row": "new:7", "steps": steps}
    assert "--row :3: must be SOURCE:ROW, with the" in cli("rows", tmp_path / "run", "--row", ":3", code=2).err
    message = "--row other:7: must be SOURCE:ROW, with the sources new, web"
    assert message in cli("rows", tmp_path / "run", "--row", "other:7", code=2).err
    assert "--row new:9: must be in range(9)" in cli("rows", tmp_path / "run", "--row", "new:9", code=2).err


def of_start(start: str, first: int, stop: int, batches: Any, at: float = 0.0, **card: Any) -> list[dict[str, Any]]:
    """Return the lines of a start that took some steps."""
    time = TIME + at
    about = {"batches": {"hash": "1", **batches.definition()}, "recipe": batches.recipe(), **card}
    steps = {"step": [first, stop], "time": time + 1, "time_again": time + 1}
    return [
        start_line("/x", start, time=time, time_again=time),
        card_line(start, **about),
        times_line(start, **steps),
    ]


def test_the_last_start_that_repeats_a_step_counts(tmp_path: Any, cli: Any) -> None:
    seeds = [jstep.batches(DATA, 4, seed=seed) for seed in range(4)]
    spans = [(0, 9), (6, 8), (8, 8), (3, 5)]
    starts = [of_start(f"{i}", *span, seeds[i], 10.0 * i) for i, span in enumerate(spans)]
    write_lines(tmp_path / "run", *(line for lines in starts for line in lines))
    of = [0, 0, 0, 3, 3, 0, 1, 1, 0]
    check(cli, tmp_path / "run", 0, 9, lambda step: seeds[of[step]], (0, 7, 22))
    # A branch that began after the second start: what the trunk took later is not its own.
    lines = of_start("b", 8, 9, seeds[2], 15.0)
    for path in ("run/model-8", "run/best/best-8"):
        parent = {"path": str(tmp_path / path), "step": 8}
        write_lines(tmp_path / "branch", lines[0] | {"parent": parent}, lines[1], lines[2] | {"parent": parent})
        assert ask(cli, tmp_path / "branch", "--step", 7)["rows"] == seeds[1].rows_of(7).tolist()
    for path in ("run/a/b/best-8", "circle/model-8"):
        parent = {"path": str(tmp_path / path), "step": 8}
        write_lines(tmp_path / "circle", lines[0] | {"parent": parent}, lines[1], lines[2] | {"parent": parent})
        assert f"{path}: its run is not there" in cli("rows", tmp_path / "circle", "--step", 7, code=2).err
    check(cli, tmp_path / "branch", 0, 9, lambda step: seeds[[0, 0, 0, 0, 0, 0, 1, 1, 2][step]], (0, 7, 22))


WRONG = {
    ("--step", "80"): "--step 80: must be in the run, which took steps 3 to 9",
    ("--step", "-1"): "--step -1: must be in the run",
    ("--step", "4", "--to", "5"): "--from and --to: are options of --row",
    ("--row", "23"): "--row 23: must be in range(23)",
    ("--row", "-1"): "--row -1: must be in range(23)",
    ("--row", "x"): "--row x: must be the number of a row, or SOURCE:ROW",
    ("--row", "web:3"): "--row web:3: must be the number of a row, in steps 3 to 9",
    ("--row", "3", "--from", "10"): "--from 10: must be in the run, which took steps 3 to 9",
    ("--row", "3", "--from", "6", "--to", "4"): "--from 6 --to 4: A must not be after B",
    ("--row", "web:x:"): "--row web:x:: must be the number of a row, or SOURCE:ROW",
    ("--step", "4", "--prefix", "best"): "--prefix must be that of one run there, model; got best",
}


def test_wrong_usage(tmp_path: Any, cli: Any) -> None:
    data = jstep.batches(DATA, 4, seed=3)
    write_lines(tmp_path / "runs" / "a", *of_start("a", 3, 10, data))
    for arguments, message in WRONG.items():
        found = cli("rows", tmp_path / "runs" / "a", *arguments, code=2)
        assert (found.out, message in found.err) == ("", True), found.err
    assert (
        "is a directory of runs (a): `python -m jstep runs " in cli("rows", tmp_path / "runs", "--step", 3, code=2).err
    )
    (tmp_path / "empty").mkdir()
    assert "no run is there" in cli("rows", tmp_path / "empty", "--step", 3, code=2).err
    assert "no such directory" in cli("rows", tmp_path / "nowhere", "--step", 3, code=2).err
    lines = [line | {"prefix": "b"} for line in of_start("b", 0, 2, data)]
    write_lines(tmp_path / "two", *of_start("a", 3, 10, data), *lines)
    assert "must be that of one run there, b, model; got none" in cli("rows", tmp_path / "two", "--step", 1, code=2).err
    assert ask(cli, tmp_path / "two", "--step", 1, "--prefix", "b")["rows"] == data.rows_of(1).tolist()


MIX = jstep.mixture(SOURCES, 6, THIRDS, seed=1)
SKIPPED = jstep.batches(DATA, {0: 4, 5: 2}, seed=3).skip(4, 6)
OLD = {
    "wrapped": ({"batches": {"kind": "my.Loader"}, "recipe": None}, "the batches were my.Loader, whose rows only"),
    "mixture": ({"batches": MIX.definition(), "recipe": None}, "lacks exact weights; newer versions"),
    "hashed": ({"batches": {"kind": "Batches", "steps": "hash 1"}, "recipe": None}, "lacks steps"),
    "skips": ({"batches": SKIPPED.definition(), "recipe": None}, "lacks batch_size of the steps that were skipped"),
    "nothing": ({"batches": None, "recipe": None}, "the batches were None"),
    "invalid": ({"batches": 7}, "its card is invalid: batches=7"),
}


@pytest.mark.parametrize("name", OLD)
def test_batches_that_cannot_be_told(name: str, tmp_path: Any, cli: Any) -> None:
    card, message = OLD[name]
    write_run(tmp_path / "run", card=card)
    for asked in (["--step", 3], ["--row", 3]):
        found = cli("rows", tmp_path / "run", *asked, code=2)
        assert (found.out, message in found.err) == ("", True), found.err


def test_a_card_of_an_older_version(tmp_path: Any, cli: Any) -> None:
    for data in (jstep.batches(DATA, 4, seed=3).skip(2, 4), jstep.batches(DATA, {0: 4, 5: 2}, seed=3)):
        write_run(tmp_path / "run", card={"batches": {"hash": "1", **data.definition()}})
        check(cli, tmp_path / "run", 0, 10, lambda step, data=data: data, (0, 7, 22))


def hostile() -> Any:
    """Yield recipes with a value of others."""
    values = [None, -1, 2**80, 0.5, "x", [], {}, [[0, None, 0]], {"0": 0}, {"x": {"y": 1}}, [[0, 1]] * 3]
    for data in (jstep.batches(DATA, 4, num_epochs=3), MIX):
        recipe = data.recipe()
        for name in recipe:
            yield from (recipe | {name: value} for value in values)
        yield from ({key: value for key, value in recipe.items() if key != name} for name in recipe)
    yield jstep.batches(range(2**62), 2**60).recipe()
    yield MIX.recipe() | {"weights": {"0": {"web": [1, 0], "a:b": [1, 1]}}}
    yield MIX.recipe() | {"weights": {"0": {"web": [2, 1], "a:b": [-1, 1]}}}
    yield jstep.batches(DATA, 4).recipe() | {"steps": [[-9, None, 1]]}


@pytest.mark.thorough
def test_recipes_of_others(tmp_path: Any, capsys: Any) -> None:
    ways = itertools.cycle(itertools.product(("recipe", "batches"), ("--step", "--row")))
    for recipe, (name, asked) in zip(hostile(), ways, strict=False):
        write_run(tmp_path / "run", card={name: recipe})
        code = main(["rows", str(tmp_path / "run"), asked, "3"])
        found = capsys.readouterr()
        assert code in (0, 2)
        assert bool(found.err) == (code == 2)
        assert "Traceback" not in found.err, (recipe, found.err)


def test_a_parent_that_was_renamed_beside_its_branch(tmp_path: Any, cli: Any) -> None:
    data, above = jstep.batches(DATA, 4, seed=3), {"path": str(tmp_path / "run" / "model-8"), "step": 8}
    write_lines(tmp_path / "renamed", *(line | {"run": "0123abcd"} for line in of_start("a", 0, 9, data)))
    lines = of_start("b", 8, 9, data, 15.0)
    of = {"parent": above, "parent_run": "0123abcd"}
    write_lines(tmp_path / "branch", lines[0] | of, lines[1], lines[2] | of)
    assert ask(cli, tmp_path / "branch", "--step", 7)["rows"] == data.rows_of(7).tolist()


def test_unknown_steps_in_between_are_not_searched(tmp_path: Any, cli: Any) -> None:
    data = jstep.batches(DATA, 4)
    starts = [of_start(f"{i}", 5 * i, 5 * i + 5, data, 10.0 * i) for i in range(5)]
    starts[1][1] = card_line("1", batches={"kind": "my.Loader"})
    write_lines(tmp_path / "run", *(line for lines in starts for line in lines))
    found = cli("rows", tmp_path / "run", "--row", 3, code=2).out
    assert "of the steps 0 to 4, steps 10 to 24" in found


def test_more_passes_than_can_be_listed(tmp_path: Any, cli: Any) -> None:
    data = jstep.batches(np.arange(2), 2)
    write_lines(tmp_path / "run", *of_start("a", 0, 2**62, data))
    assert "pass over the data 4.61e+18 times; give --from" in cli("rows", tmp_path / "run", "--row", 0, code=2).err
    found = ask(cli, tmp_path / "run", "--row", 0, "--from", 2**61, "--to", 2**61 + 1)
    assert found["steps"] == [2**61, 2**61 + 1]
