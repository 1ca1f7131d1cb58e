"""The lines about two starts: each section, what is left out, programs, and which lines are about
bits."""

import copy

import pytest

from jstep.record.differences import PAIR_WORDS, changes, same

PROGRAM = {
    "stage": 0, "hash": "p", "batch": ["0/x: float32[4]"],
    "hyperparameters": {"learning_rate": 0.1},
}  # fmt: skip
SETUP = {
    "step": 0, "versions": {"jax": "0.10"}, "settings": {"jax_enable_x64": False},
    "environment": {"XLA_FLAGS": "--xla_a=1 --xla_b", "JAX_A": "3", "JAX_DIR": "/a"},
    "devices": {"kind": "cpu", "count": 8}, "state": {"hash": "s", "sharding": "h", "params": 2},
    "batches": {"hash": "b", "rows": 20, "seed": 3, "batch_size": {"0": 4}},
    "stages": {"0": "loss"},
    "arguments": {"last_step": 6, "batch_sharding": "d", "checkpoint_dir": "/a"}, "lanes": None,
    "programs": [PROGRAM],
}  # fmt: skip
START = {
    "setup": SETUP, "config": {"lr": 0.1, "steps": 6, "out": "/a", "token": "(not recorded)"},
    "commit": "1" * 40, "edits": None,
}  # fmt: skip


def changed(*path, to):
    start = copy.deepcopy(START)
    *folders, name = path
    part = start
    for one in folders:
        part = part[one]
    if to is ABSENT:
        del part[name]
    else:
        part[name] = to
    return start


ABSENT = object()
TRACED = "the traced step differs"


def program(**more):
    return changed("setup", "programs", to=[PROGRAM | {"hash": "q"} | more])


def of(section, **values):
    return changed("setup", section, to=SETUP[section] | values)


CASES = [
    (START, [], [], []),
    (of("versions", jax="0.11"), [], ["jax: 0.10 before, 0.11 now"], []),
    (of("settings", jax_new=1), [], [], []),  # of another version
    (of("environment", JAX_A="4", JAX_DIR="/b"), [], [], ["JAX_A: 3 before, 4 now"]),
    (of("environment", JAX_ENABLE_X64="0"), [], [], []),  # the setting is the same
    (changed("setup", to=SETUP | {"environment": SETUP["environment"] | {"JAX_ENABLE_X64": "1"},
                                "settings": {"jax_enable_x64": True}}),
     ["jax_enable_x64: false before, true now"], [], []),
    (of("environment", XLA_FLAGS="--xla_b --xla_a=1"), [], [], []),
    (
        of("environment", XLA_FLAGS="--xla_a=2 --xla_b --xla_dump_to=d"),
        ["XLA_FLAGS --xla_a: 1 before, 2 now"], [],
        ["XLA_FLAGS --xla_dump_to: absent before, d now"],
    ),
    (of("batches", hash="c"), ["batches: the definition differs"], [], []),
    (of("batches", batch_size={"0": 4, "9": 8}),
     ["batches: batch_size[9]: absent before, 8 now"], [], []),
    (of("stages", **{"9": "l"}), [], [], ["the stage from step 9: absent before, l now"]),
    (of("arguments", last_step=9, checkpoint_dir="/b"),
     [], [], ["train: last_step: 6 before, 9 now"]),
    (program(hash="p", batch=["y"]), [], [], ['batch: ["0/x: float32[4]"] before, ["y"] now']),
    # Other rows, other traces.
    (program(batch=["x"]), [], [], ['batch: ["0/x: float32[4]"] before, ["x"] now']),
    (program(hyperparameters={}), [TRACED], [], []),
    (
        # Of float32, in its own digits.
        program(hyperparameters={"learning_rate": 0.30000001192092896}),
        ["learning_rate: 0.1 before, 0.3 now", TRACED], [], [],
    ),
    (
        # Unless these are those of the other.
        program(hyperparameters={"learning_rate": 0.10000000149011612}),
        ["learning_rate: 0.1 before, 0.10000000149011612 now", TRACED], [], [],
    ),
    (program(hash=None), [TRACED], [], []),
    (program(stage=9), [], [], []),  # a later stage
    (changed("setup", "programs", to=[PROGRAM, PROGRAM | {"stage": 9}]), [], [], []),
    (changed("setup", "programs", to=[]), [], [], []),
    (changed("setup", to={}), [], [], []),
    (changed("config", "lr", to=ABSENT), ["config: lr: 0.1 before, absent now"], [], []),
    (changed("config", to={"lr": 0.1, "steps": 6, "out": "s3://b/c", "token": "x"}), [], [], []),
    (changed("config", to=None), [], [], []),
    # An option that changes as an argument of another name is named; places are not.
    (of("arguments", last_step=9) | {"config": START["config"] | {"steps": 9}},
     [], [], ["train: last_step: 6 before, 9 now"]),
    (of("arguments", last_step=9) | {"config": START["config"] | {"augment": 9}},
     ["config: augment: absent before, 9 now"], [], ["train: last_step: 6 before, 9 now"]),
    (of("arguments", checkpoint_dir="runs/a")
     | {"config": START["config"] | {"logs": "runs/a/logs", "logdir": "x"}},
     [], [], []),
    (changed("commit", to="2" * 40), [], ["code: commit 11111111 before, commit 22222222 now"], []),
    (changed("edits", to="a"),
     [], ["code: commit 11111111 before, commit 11111111 with edits a not committed now"], []),
    (changed("commit", to=None), [], [], []),
]  # fmt: skip


@pytest.mark.parametrize(("other", "bits", "place", "others"), CASES, ids=range(len(CASES)))
def test_the_lines_about_two_starts(other, bits, place, others):
    found = changes(START, other)
    assert (found.bits, found.place, found.others) == (bits, place, others)
    assert found.lines == [*bits, *place, *others]
    assert len(changes(other, START, PAIR_WORDS).lines) == len(found.lines)


def test_optimizers_are_named_in_the_words_of_the_caller():
    a, b = (
        changed("setup", "programs", to=[PROGRAM | {"hash": name, "optimizer": name}])
        for name in ("sgd", "adam")
    )
    assert changes(a, b).bits == [f"{TRACED} (sgd before, adam now)"]
    assert changes(a, b, PAIR_WORDS).bits == [f"{TRACED} (sgd in A, adam in B)"]


@pytest.mark.parametrize(("section", "level"), [("versions", 1), ("settings", 0), ("devices", 1)])
def test_another_step_is_also_named_where_its_trace_may_differ_for_another_reason(section, level):
    other = program()
    other["setup"][section] = dict.fromkeys(SETUP[section], "other")
    assert TRACED in changes(START, other)[level]
    assert TRACED in changes(START, program() | {"commit": "2" * 40, "config": {"lr": 3}}).bits
    other["setup"] |= {"lanes": 4}
    assert (TRACED in changes(START, other).lines) == (section != "devices")


def test_values_are_shown_as_json_where_texts_would_be_equal():
    assert changes(START, changed("config", "lr", to="0.1")).bits == [
        'config: lr: 0.1 before, "0.1" now'
    ]
    (line,) = changes(START, changed("config", "lr", to="a" * 100)).bits
    assert line == f"config: lr: 0.1 before, {'a' * 79}… now"
    assert not same(1, True)
    assert not same(0.1, "0.1")
    assert same({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_an_option_is_an_argument_only_by_its_name():
    before = of("arguments", steps_per_call=1) | {
        "config": {"augment": 1, "steps_per_call": 1, "train/last_step": 6}
    }
    now = of("arguments", steps_per_call=4) | {
        "config": {"augment": 4, "steps_per_call": 4, "train/last_step": 6}
    }
    assert changes(before, now).lines == [
        "config: augment: 1 before, 4 now",
        "train: steps_per_call: 1 before, 4 now",
    ]


def test_other_values_of_ten_thousand_hyperparameters_are_one_optimizer():
    """A stranger's setup has as many as fit into its bytes: one pass for each of them would take a
    minute."""
    starts = []
    for shift in (0.0, 1.0):
        values = {f"part{i}/rate{i}": i + shift for i in range(10_000)}
        text = f"chain({', '.join(f'rate{i}={value}' for i, value in enumerate(values.values()))})"
        starts.append(program(hash=text[:20], hyperparameters=values, optimizer=text))
    assert TRACED in changes(*starts).bits
    # Another optimizer is named, also if it has the same values.
    other = copy.deepcopy(starts[1])
    other["setup"]["programs"][0]["optimizer"] = starts[1]["setup"]["programs"][0][
        "optimizer"
    ].replace("chain", "sum")
    assert f"{TRACED} (chain(rate0=0.0" in "".join(changes(starts[0], other).bits)
