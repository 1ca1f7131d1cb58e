"""The lines about two cards, whole: each section, what is left out, programs and their optimizers."""

import copy
from typing import Any

import pytest

from jstep.hooks.card_differences import BEFORE_AND_NOW, card_difference, card_values, changes, differences

PROGRAM: dict[str, Any] = {
    "stage": 0, "steps": 1, "hash": "p", "batch": ["0/x: float32[4]"], "optimizer": ["adam"],
    "hyperparameters": {"learning_rate": 0.1}, "operations": {"add": 2, "mul": 1}, "numbers": {"0.9": 1},
    "elements": {
        "adam": {"learning_rate": 0.1, "beta1": 0.9, "mask": None, "schedule": {"fn": "first"}},
        "critic/momentum": {"learning_rate": 0.5, "use_nesterov": False},
    },
}  # fmt: skip
CARD: dict[str, Any] = {
    "card": 1, "step": 0, "versions": {"jax": "0.10"}, "settings": {"jax_enable_x64": False},
    "environment": {"XLA_FLAGS": "--xla_a=1 --xla_b", "SEED": "3", "HOME_DIR": "/a", "PORT": "h:1"},
    "devices": {"kind": "cpu", "count": 8}, "state": {"hash": "s", "sharding": "h", "params": 2, "held": {}},
    "batches": {"hash": "b", "rows": 20, "seed": 3, "batch_size": {"0": 4}}, "stages": {"0": "loss"},
    "arguments": {"last_step": 6, "hooks": ["A", "B"], "checkpoint_dir": "/a"}, "lanes": None, "programs": [PROGRAM],
}  # fmt: skip


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The card with another value at a path."""
    card = copy.deepcopy(CARD)
    *folders, name = path
    part = card
    for one in folders:
        part = part[one]
    if to is None:
        del part[name]
    else:
        part[name] = to
    return card


OTHER_PROGRAM = changed("programs", 0, "hash", to="q")["programs"][0]


def program(**more: Any) -> dict[str, Any]:
    """The card with another program."""
    return changed("programs", to=[OTHER_PROGRAM | more])


TRACED = "step: the traced loss (stage from step 0)"
LINES = [
    (CARD, []),
    (changed("versions", "jax", to="0.11"), ["jax: 0.10 in A, 0.11 in B"]),
    (changed("settings", "jax_enable_x64", to=True), ["jax_enable_x64: false in A, true in B"]),
    (changed("environment", "SEED", to="4"), ["SEED: 3 in A, 4 in B"]),
    (changed("environment", "HOME_DIR", to="/b"), []),
    (changed("environment", "PORT", to="other"), []),  # it is an address in one of them
    (changed("environment", "XLA_FLAGS", to="--xla_b --xla_a=1"), []),
    (
        changed("environment", "XLA_FLAGS", to="--xla_a=2 --xla_c"),
        ["XLA_FLAGS --xla_a: 1 in A, 2 in B", "XLA_FLAGS --xla_b: set in A, absent in B",
         "XLA_FLAGS --xla_c: absent in A, set in B"],
    ),
    (changed("devices", "count", to=4), ["devices: count: 8 in A, 4 in B"]),
    (changed("state", "params", to=3), ["state: params: 2 in A, 3 in B"]),
    (changed("state", "hash", to="t"), ["state: paths, shapes or dtypes of its leaves differ"]),
    (changed("state", "sharding", to="i"), ["state: its leaves are sharded differently"]),
    (
        changed("state", to=CARD["state"] | {"hash": "t", "sharding": "i"}),
        ["state: paths, shapes or dtypes of its leaves differ"],
    ),
    (
        changed("state", to=CARD["state"] | {"params": 3, "hash": "t", "sharding": "i"}),
        ["state: params: 2 in A, 3 in B"],
    ),
    (
        changed("state", to=CARD["state"] | {"params": 3, "sharding": "i"}),
        ["state: params: 2 in A, 3 in B", "state: its leaves are sharded differently"],
    ),
    (changed("batches", "hash", to="c"), ["batches: the definition differs"]),
    (changed("batches", to=CARD["batches"] | {"hash": "c", "seed": 4}), ["batches: seed: 3 in A, 4 in B"]),
    (changed("batches", "batch_size", to={"0": 5}), ["batches: batch_size: 4 in A, 5 in B"]),
    (
        changed("batches", "batch_size", to={"0": 4, "9": 8}),
        ["batches: batch_size[9]: absent in A, 8 in B"],
    ),
    (changed("stages", to={"0": "loss", "9": "l"}), ["the stage from step 9: absent in A, l in B"]),
    (changed("arguments", "last_step", to=9), ["train: last_step: 6 in A, 9 in B"]),
    (changed("arguments", "checkpoint_dir", to="/b"), []),
    (changed("arguments", "hooks", to=["A"]), ["train: hooks: B only in A"]),
    (changed("arguments", "hooks", to=["A", "C"]), ["train: hooks: B only in A; C only in B"]),
    (changed("arguments", "hooks", to=["B", "A"]), ['train: hooks: another order, ["A", "B"] in A, ["B", "A"] in B']),
    (changed("lanes", to=4), ["lanes: null in A, 4 in B"]),
    (changed("programs", 0, "steps", to=5), []),
    (changed("programs", 0, "batch", to=["0/x: float32[8]"]), []),  # another batch size of the same rows
    (
        program(),
        [f"{TRACED} differs: the same numbers and operations, in another order or on other shapes and constants"],
    ),
    (
        program(numbers={"0.9": 2, "1.0": 1}, operations={"add": 2}),
        [f"{TRACED} differs: numbers 0.9 (1 in A, 2 in B), 1.0 (0 in A, 1 in B); operations mul (1 in A, 0 in B)"],
    ),
    (
        program(elements={"adam": PROGRAM["elements"]["adam"] | {"learning_rate": 0.2, "beta1": 0.8, "mask": True}}),
        ["step: optimizer: critic/momentum only in A", "step: learning_rate: 0.1 in A, 0.2 in B",
         "step: beta1: 0.9 in A, 0.8 in B", "step: mask: None in A, True in B",
         f"{TRACED} differs: the same numbers and operations, in another order or on other shapes and constants"],
    ),
    (
        program(elements={**PROGRAM["elements"], "critic/momentum": {"learning_rate": {"fn": "g"}}})
        | {"batches": CARD["batches"] | {"seed": 4}},
        ["batches: seed: 3 in A, 4 in B", "step: critic/learning_rate: 0.5 in A, g in B",
         f"{TRACED} differs: the same numbers and operations, in another order or on other shapes and constants"],
    ),
    (
        program(elements={}, optimizer=["sgd"], hyperparameters={"learning_rate": 0.2}),
        ["step: optimizer: adam only in A; sgd only in B", "step: learning_rate: 0.1 in A, 0.2 in B",
         f"{TRACED} differs: the same numbers and operations, in another order or on other shapes and constants"],
    ),
    (
        program(batch=["0/x: float32[8]"]) | {"batches": {"hash": "c"}},
        ["batches: batch_size: {\"0\": 4} in A, absent in B", "batches: rows: 20 in A, absent in B",
         "batches: seed: 3 in A, absent in B",
         "batch: 0/x: float32[4] only in A; 0/x: float32[8] only in B",
         f"{TRACED} has the same operations; its numbers were not compared, as the batches differ in shape"],
    ),
    (
        program(batch=["0/x: float32[8]"], operations={"add": 3, "mul": 1})
        | {"batches": CARD["batches"] | {"seed": 4}},
        ["batches: seed: 3 in A, 4 in B", "batch: 0/x: float32[4] only in A; 0/x: float32[8] only in B",
         f"{TRACED} differs, on batches of different shapes: operations add (2 in A, 3 in B)"],
    ),
    (changed("programs", 0, "hash", to=None), []),
    (changed("programs", to=[PROGRAM | {"stage": 9, "hash": "x"}]), []),
    (changed("programs", to=[3, {"stage": "0"}]), []),
]  # fmt: skip


@pytest.mark.parametrize(("other", "lines"), LINES, ids=range(len(LINES)))
def test_the_lines_about_two_cards(other: dict[str, Any], lines: list[str]) -> None:
    assert card_difference(CARD, other) == lines
    back = card_difference(other, CARD)
    assert len(back) == len(lines)


def test_what_changes_the_bits_of_a_run() -> None:
    """The lines about bits and those about the place of a run; what does neither is left out."""
    cases: list[tuple[dict[str, Any], tuple[list[str], list[str]]]] = [
        (changed("versions", "jax", to="0.11"), ([], ["jax: 0.10 before, 0.11 now"])),
        (changed("settings", "jax_enable_x64", to=True), (["jax_enable_x64: false before, true now"], [])),
        (changed("environment", "SEED", to="4"), ([], [])),
        (
            changed("environment", "XLA_FLAGS", to="--xla_a=2 --xla_b"),
            (["XLA_FLAGS --xla_a: 1 before, 2 now"], []),
        ),
        (changed("environment", "XLA_FLAGS", to="--xla_a=1 --xla_b --xla_dump_to=d"), ([], [])),
        (changed("devices", "count", to=4), ([], ["devices: count: 8 before, 4 now"])),
        (changed("state", "hash", to="t"), (["state: paths, shapes or dtypes of its leaves differ"], [])),
        (changed("state", "sharding", to="i"), ([], ["state: its leaves are sharded differently"])),
        (changed("state", "held", to={"learning_rate": 1.0}), ([], [])),
        (changed("batches", "seed", to=4), (["batches: seed: 3 before, 4 now"], [])),
        (changed("stages", "0", to="other"), ([], [])),
        (changed("arguments", "last_step", to=9), ([], [])),
        (changed("lanes", to=4), (["lanes: null before, 4 now"], [])),
    ]
    for card, expected in cases:
        assert tuple(map(list, changes(CARD, card, 0))) == expected


def test_values_that_are_long_are_cut() -> None:
    (line,) = differences("x", "a" * 81, ["b"], BEFORE_AND_NOW)
    assert line.endswith('… before, ["b"] now')
    assert list(differences("x", "a" * 80, "", BEFORE_AND_NOW)) == [f'x: {"a" * 80} before, "" now']
    assert list(differences("x", 0.1, "0.1")) == ['x: 0.1 in A, "0.1" in B']
    assert list(differences("", {"x": "absent"}, {})) == ['x: "absent" in A, absent in B']
    ends = [[*range(500), end] for end in (7, 8)]
    assert list(differences("x", *ends)) == ["x: …496, 497, 498, 499, 7] in A, …496, 497, 498, 499, 8] in B"]
    assert list(differences("x", "a" * 90, "a" * 91)) == [f'x: …{"a" * 20}" in A, …{"a" * 20}a" in B']
    assert list(differences("x", 1, True)) == ["x: 1 in A, true in B"]  # equal in Python
    assert list(differences("x", {"0": 1}, {"0": {"1": 2}})) == ['x: 1 in A, {"1": 2} in B']
    assert list(differences("x", {"0": 1}, {"0": 2}, BEFORE_AND_NOW)) == ["x: 1 before, 2 now"]
    assert list(differences("", {"b": 1, "a": 2}, {"b": 2, "a": 3})) == ["b: 1 in A, 2 in B", "a: 2 in A, 3 in B"]
    assert list(differences("", {"b": 1}, {"a": 3})) == ["a: absent in A, 3 in B", "b: 1 in A, absent in B"]


def of_config(config: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    return CARD | {"config": config, "arguments": CARD["arguments"] | arguments}


@pytest.mark.parametrize("place", ["checkpoint_dir", "logdir", "start_from"])
@pytest.mark.parametrize(("own", "value"), [("runs/{}", "runs/{}"), ("runs/{}/", "runs/{}/logs"), ("{}/model", "{}")])
def test_an_option_that_is_a_directory_of_the_run_is_no_difference(place: str, own: str, value: str) -> None:
    a, b = (of_config({"dir": value.format(x), "name": f"the {x}"}, **{place: own.format(x)}) for x in "ab")
    assert card_difference(a, b) == ["config: name: the a in A, the b in B"]
    assert "config: dir" not in card_values(a)
    assert card_values(a)["config: name"] == "the a"


def test_an_option_beside_the_directories_of_the_run_is_compared() -> None:
    a, b = (of_config({"data": f"sets/{x}", "run": "run"}, checkpoint_dir=f"run{x}/model") for x in "ab")
    assert card_difference(a, b) == ["config: data: sets/a in A, sets/b in B"]
    assert card_values(a)["config: run"] == "run"


def test_settings_at_their_default_are_no_change():
    none, default, other = ({"settings": {"jax_random_seed_offset": value}} for value in (None, "0", "1"))
    assert card_difference(none, default) == card_difference({"settings": {}}, default) == []
    assert card_difference(none, other) == ["jax_random_seed_offset: null in A, 1 in B"]
    assert changes(none, default, 0) == ([], [])
    assert changes(default, other, 0) == (["jax_random_seed_offset: 0 before, 1 now"], [])
