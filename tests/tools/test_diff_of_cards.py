"""`diff` first lists the differences between the cards of two runs."""

import json
import re

import jax.numpy as jnp
import pytest

import jstep

OPTIMIZER = jstep.gradient_descent(0.1)


def line(**fields):
    return json.dumps({"kind": "card", "start": "0", "prefix": "model", **fields}) + "\n"


def card(seed=0, **more):
    program = {"stage": 0, "steps": 1, "hash": "00", "batch": [], "hyperparameters": {"learning_rate": 0.1}}
    batches = {"hash": str(seed), "kind": "Batches", "rows": 64, "seed": seed}
    return line(card=1, batches=batches, stages={"0": "loss"}, programs=[program], **more)


@pytest.fixture
def run(tmp_path):
    def run(name, *lines, value=1.0, prefixes=("model",)):
        for prefix in prefixes:
            with jstep.Saver(tmp_path / name, prefix=prefix, async_save=False) as saver:
                saver.save(jstep.TrainState.create({"w": jnp.full(2, value)}, OPTIMIZER, global_step=3))
        if lines:
            (tmp_path / name / "timeline.jsonl").write_text("".join(lines))
        return str(tmp_path / name)

    return run


def test_cards_of_the_last_starts_are_compared_first(run, cli):
    a, b = run("a", card(7), card(0)), run("b", card(1), value=2.0)
    first, second, third, *_ = cli("diff", a, b, code=1).out.splitlines()
    assert (first, second) == ("the cards of the last starts differ:", "  batches: seed: 0 in A, 1 in B")
    assert third.startswith("the runs diverge at step 3")
    assert json.loads(cli("diff", a, b, "--json", code=1).out)["cards"] == ["batches: seed: 0 in A, 1 in B"]


def test_the_last_start_of_a_copied_run_is_known_by_its_time(run, tmp_path, cli):
    a, b = run("a", card(7)), run("b", card(0))
    for time, (start, file, seed) in enumerate([("0", "timeline.jsonl", 7), ("1", "timeline.20261122T1-1.jsonl", 0)]):
        began = json.dumps({"kind": "start", "start": start, "prefix": "model", "version": 1, "time": time})
        own = card(seed).replace('"start": "0"', f'"start": "{start}"')
        (tmp_path / "a" / file).write_text(f"{began}\n{own}")
    assert "the cards of the last starts do not differ" in cli("diff", a, b).out


@pytest.mark.parametrize(("seed", "message"), [(1, "differ:"), (0, "do not differ")])
def test_the_exit_code_depends_only_on_the_leaves(run, cli, seed, message):
    a, b = run("a", card(0)), run("b", card(seed))
    assert f"the cards of the last starts {message}" in cli("diff", a, b).out
    assert f"the cards of the last starts {message}" in cli("diff", f"{a}/model-3", f"{b}/model-3").out


@pytest.mark.parametrize("lines", [(), ("{", "null\n", '{"kind": "card"}\n', '{"kind": "parts", "card": 1}\n')])
def test_without_a_card_nothing_is_printed(run, cli, lines):
    a, b = run("a", *lines), run("b", card())
    assert cli("diff", a, b).out == "identical at the only common step, 3\n"


def start(number, rate=0.1, step=0, **more):
    began = {"kind": "start", "start": str(number), "prefix": "model", "version": 1, "time": 1764030000 + number}
    program = {"stage": 0, "steps": 1, "hash": None, "batch": [], "hyperparameters": {"learning_rate": rate}}
    fields = {"card": 1, "step": step, "stages": {"0": "loss"}, "programs": [program], **more}
    return json.dumps(began) + "\n" + line(**fields).replace('"start": "0"', f'"start": "{number}"')


def test_the_starts_of_one_run_are_compared(run, cli):
    """Later stages, the number of steps, and hooks do not count."""
    versions, later = {"versions": {"jax": "0.10"}}, {"last_step": 20, "steps_per_call": 10}
    lines = [
        start(0, arguments={"last_step": 10}),
        start(1, 0.2, 10, arguments=later),
        start(2, 0.2, 20, arguments=later),
        start(3, 0.2, 30, **versions),
        start(4, 0.5, 40, card=2),
        start(5, 0.3, 40, **versions),
    ]
    a = run("a", *lines)
    found = [re.sub(r"^[\d-]+ [\d:]+, ", "", line) for line in cli("diff", a).out.splitlines()]
    assert found == [
        "from step 0: the first start",
        "from step 10: changed since the start before:",
        "  learning_rate: 0.1 before, 0.2 now",
        "from step 20: nothing has changed",
        "from step 30: changed since the start before:",
        "  jax: absent before, 0.10 now",
        "from step 40: a card of another version",
        "from step 40: changed since the start before:",
        "  learning_rate: 0.2 before, 0.3 now",
    ]
    starts = json.loads(cli("diff", a, "--json").out)["starts"]
    assert [one["changes"] for one in starts][1:3] == [["learning_rate: 0.1 before, 0.2 now"], []]


def test_a_run_without_a_card_is_an_error(run, cli):
    assert "there is no timeline" in cli("diff", run("a"), code=2).err
    assert "its timeline has no card" in cli("diff", run("b", "{}\n"), code=2).err


MALICIOUS = [
    card().replace('"Batches"', '"\\u001b[2J"'),
    line(card=1, batches=[1], programs={"x": 1}, stages="x", environment={"XLA_FLAGS": 3}, versions={"jax": {}}),
    line(card=1, programs=[1, {"stage": "x"}, {"stage": 0, "steps": 1, "hash": [], "hyperparameters": 3}]),
    line(card=[], environment={"": None}, state={"hash": 1}, arguments={"hooks": [1]}),
    card(lanes=[1], settings=3).replace(
        '"hyperparameters"', '"elements": {"adam": 3, "x": {"y": []}}, "hyperparameters"'
    ),
]


@pytest.mark.thorough(except_for=["malicious1", "malicious4"])
@pytest.mark.parametrize("malicious", MALICIOUS)
def test_malicious_cards_are_harmless(run, cli, malicious):
    a, b = run("a", card()), run("b", malicious)
    output = cli("diff", a, b)
    assert "\x1b" not in output.out
    assert output.err == ""
    c = run("c", card(), malicious.replace('"start": "0"', '"start": "1"'), card())
    assert "\x1b" not in cli("diff", c).out
