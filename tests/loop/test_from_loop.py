"""`jstep.from_loop`: the objects of a loop are saved between two iterations, and restored when the
run is entered."""

import collections
import dataclasses
import os
import random
import signal
import sys
import threading
import types

import jax
import numpy as np
import pytest
from loop_runs import DATA, STEP, BoomError, Counted, doubled, make_state, same

import jstep


def run_of(last_step, directory, *, save_checkpoint_steps=4, **kept):
    return jstep.Run(
        STEP,
        make_state(),
        jstep.from_loop(**kept),
        last_step,
        checkpoint_dir=directory,
        save_checkpoint_steps=save_checkpoint_steps,
        progress=False,
    )


class Walk:
    """An environment in Python whose attributes are its state."""

    def __init__(self, rng=None):
        self.rng, self.place, self.seen = (
            np.random.default_rng(5) if rng is None else rng,
            np.zeros(3),
            [],
        )

    def move(self):
        self.place = self.place + self.rng.normal(size=3)
        self.seen.append((float(self.place[0]), None))
        return self.place


class Asked:
    def __init__(self):
        self.asked = self.number = 0

    def get_state(self):
        self.asked += 1
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


def play(last_step, directory, *, at=None, event=lambda: None, steps=1):
    """Run a loop whose batches depend on objects of each kind; at a step, something happens in the
    body."""
    rng, python, seen, loader, walk = (
        np.random.default_rng(0),
        random.Random(1),
        {"steps": []},
        Counted(),
        Walk(),
    )
    values = types.SimpleNamespace(total=0.0, last=None)
    kept = {
        "rng": rng,
        "python": python,
        "seen": seen,
        "loader": loader,
        "walk": walk,
        "values": values,
    }
    with run_of(last_step, directory, **kept) as run:
        for step in run:
            for n in range(steps):
                batch = next(loader)
                if rng.random() < python.random():
                    seen["steps"].append(step)
                values.total, values.last = values.total + float(walk.move()[1]), step
                if step + n == at:
                    event()
                run.train_step(
                    {
                        name: array * np.float32(1 + values.total / 100)
                        for name, array in batch.items()
                    }
                )
    return run.state, (rng.random(), python.random(), seen, walk.seen, walk.place.tolist(), values)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_stopped_loop_resumes_bitwise(steps, tmp_path):
    whole = play(12, tmp_path / "a", steps=steps)

    def raise_error():
        raise BoomError

    with pytest.raises(BoomError):
        play(12, tmp_path / "b", at=7, event=raise_error, steps=steps)
    assert jstep.Saver(tmp_path / "b").latest_step() == (4 if steps == 1 else 6)
    with pytest.raises(jstep.Preempted):
        play(
            12,
            tmp_path / "b",
            at=10,
            event=lambda: signal.raise_signal(signal.SIGTERM),
            steps=steps,
        )
    assert jstep.Saver(tmp_path / "b").latest_step() == (11 if steps == 1 else 12)
    resumed = play(12, tmp_path / "b", steps=steps)
    assert same(resumed[0], whole[0])
    assert resumed[1] == whole[1]


def test_objects_are_asked_only_when_a_checkpoint_is_saved(tmp_path):
    asked = Asked()
    with run_of(12, tmp_path, asked=asked) as run:
        for step in run:
            run.train_step(DATA[step])
            asked.number += 1
    assert asked.asked <= 1 + len(jstep.Saver(tmp_path).all_steps())
    again = Asked()
    with run_of(12, tmp_path, asked=again):
        assert again.number == 12


@pytest.mark.parametrize(
    "problem", ["before the step", "after the step", "cannot be saved", "after a replacement"]
)
def test_nothing_of_an_iteration_that_fails_is_saved(problem, tmp_path):
    def go(name, fail=False):
        noise = {"scale": np.float32(1)}
        with run_of(12, tmp_path / name, noise=noise) as run:
            for step in run:
                noise["scale"] += np.float32(0.5)
                if step == 6 and problem == "after a replacement":
                    run.state = doubled(run.state)
                if fail and step == 6 and problem in ("before the step", "after a replacement"):
                    raise BoomError(problem)
                run.train_step(jax.tree.map(lambda leaf: leaf * noise["scale"], DATA[step]))
                if fail and step == 6 and problem == "after the step":
                    raise BoomError(problem)
                if fail and step == 6:
                    noise["log"] = sys.stderr
        return run.state

    with pytest.raises(TypeError if problem == "cannot be saved" else BoomError) as caught:
        go("run", fail=True)
    assert "is not saved" in caught.value.__notes__[0]
    assert jstep.Saver(tmp_path / "run").latest_step() == 4
    assert same(go("run"), go("whole"))


def test_iterations_without_a_step_are_saved_when_the_run_is_stopped(tmp_path):
    def go(directory, at=None):
        kept = {"n": 0}
        with run_of(6, directory, kept=kept) as run:
            for step in run:
                kept["n"] += 1
                if kept["n"] <= 6:  # a warm-up that changes the state
                    run.state = run.state.replace(params={"w": run.state.params["w"] + kept["n"]})
                else:
                    run.train_step(DATA[step])
                if kept["n"] == at:
                    signal.raise_signal(signal.SIGTERM)
        return run.state

    whole = go(tmp_path / "a")
    with pytest.raises(jstep.Preempted):
        go(tmp_path / "b", 3)
    assert same(go(tmp_path / "b"), whole)


class Replay(collections.deque):
    pass


class Slotted(Walk):
    __slots__ = ("count",)


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: object


PLACES = {
    "itself": lambda rng: rng,
    "dict": lambda rng: {"a": {"b": rng}},
    "list": lambda rng: {"a": [0, [rng]]},
    "tuple": lambda rng: {"a": (1, (rng, 2))},
    "keys": lambda rng: {1: {(2, "a"): rng}, "$tag": 0},
    "ordered": lambda rng: {"a": collections.OrderedDict(b=rng)},
    "object": lambda rng: types.SimpleNamespace(a=rng),
    "dict in an object": lambda rng: Frozen({"a": [{"b": rng}]}),
}
GENERATORS = {
    "numpy": (np.random.default_rng, lambda rng: rng.normal()),
    "spawned": (np.random.default_rng, lambda rng: rng.spawn(1)[0].normal()),
    "legacy": (np.random.RandomState, lambda rng: rng.normal()),
    "bits": (np.random.Philox, lambda bits: np.random.Generator(bits).normal()),
    "python": (random.Random, lambda rng: rng.gauss()),
}


def test_generators_are_set_in_place_and_arrays_keep_their_order(tmp_path):
    """The loop draws from them by names of its own."""

    def go(last_step, directory):
        rngs, kept = {}, {}
        for kind, (make, _) in GENERATORS.items():
            for place, wrap in PLACES.items():
                rngs[kind, place] = make(len(rngs))
                kept[f"{kind} {place}"] = wrap(rngs[kind, place])
        kept["table"] = {
            "x": np.asfortranarray(
                np.random.default_rng(0).normal(size=(37, 53)).astype(np.float32)
            )
        }
        drawn = []
        with run_of(last_step, directory, **kept) as run:
            for step in run:
                drawn.append(
                    [GENERATORS[kind][1](rng) for (kind, _), rng in rngs.items()]
                    + [kept["table"]["x"].sum()]
                )
                kept["table"]["x"] *= np.float32(1.01)
                run.train_step(DATA[step])
        return drawn

    whole = go(6, tmp_path / "a")
    go(4, tmp_path / "b")
    assert go(6, tmp_path / "b") == whole[4:]


def test_items_are_in_the_order_of_the_checkpoint(tmp_path):
    for last_step in (4, 8):
        scores = {"a": 1.0, "b": 2.0}
        with run_of(last_step, tmp_path, scores=scores) as run:
            for step in run:
                scores["a"] = scores.pop("a") + 1
                run.train_step(DATA[step])
            assert [*scores] == ["b", "a"]
    scores = {"a": 0.0, "b": 0.0, "c": 0.0}
    with run_of(8, tmp_path, scores=scores):
        assert [*scores] == ["b", "a"]


class Course:
    level, rng, seen, fixed, large = (
        0,
        np.random.default_rng(0),
        {"steps": [0]},
        (1, float("nan")),
        np.zeros(10**6),
    )
    spans = (np.zeros(2),)

    def __init__(self):
        self.scale, self.names = 1.0, {}


CHANGES = {
    "level": lambda: setattr(Course, "level", Course.level + 1),
    "rng": lambda: Course.rng.normal(),
    "seen": lambda: Course.seen["steps"].append(1),
    "spans": lambda: Course.spans[0].__iadd__(1),
    "new": lambda: setattr(Course, "new", 1),
    "": lambda: None,
}


@pytest.mark.parametrize("name", CHANGES, ids=[name or "nothing" for name in CHANGES])
def test_the_log_says_what_is_kept_and_warns_of_an_attribute_of_a_class(name, tmp_path, caplog):
    caplog.set_level("INFO", logger="jstep")
    kept = {"course": Course(), "scores": {"a": 1.0}, "rng": np.random.default_rng(1)}
    with run_of(8, tmp_path, save_checkpoint_steps=2, **kept) as run:
        for step in run:
            CHANGES[name]()
            kept["course"].scale += 1
            run.train_step(DATA[step])
    lines = [record.getMessage() for record in caplog.records if "from_loop" in record.getMessage()]
    assert lines[0] == "from_loop keeps course (scale, names), scores (a), rng"
    assert len(lines) == 1 + bool(name)
    assert all(
        line.startswith(f"from_loop: Course.{name} has changed, and is not kept")
        for line in lines[1:]
    )


REJECTED = [
    3,
    2.5,
    "text",
    [1],
    np.zeros(3),
    len,
    Walk,
    None,
    (1,),
    Replay([1]),
    Slotted(),
    open(os.devnull),  # noqa: SIM115
]


@pytest.mark.parametrize("value", REJECTED)
def test_what_has_no_state_that_can_be_set_is_rejected(value):
    with pytest.raises(TypeError, match="from_loop: thing="):
        jstep.from_loop(thing=value)


def test_what_cannot_be_saved_is_named_before_the_first_step(tmp_path):
    walk = Walk()
    walk.lock = threading.Lock()
    with (
        pytest.raises(TypeError, match=r"from_loop.*\['walk'\]\['lock'\]"),
        run_of(5, tmp_path, walk=walk) as run,
    ):
        next(run)
    rng = np.random.default_rng(0)
    twice = types.SimpleNamespace(rng=rng)
    with (
        pytest.raises(TypeError, match="several places"),
        run_of(5, tmp_path, rng=rng, twice=twice) as run,
    ):
        next(run)
    assert jstep.Saver(tmp_path).latest_step() is None


class Later(Walk):
    def __init__(self):
        super().__init__()
        self.speed = 1.0


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ({"walk": Walk()}, "states of asked, walk.*keeps walk"),
        ({"walk": Later(), "asked": Asked()}, "walk: .*no value for its speed"),
        (
            {"walk": random.Random(0), "asked": Asked()},
            "walk: .*has a dict for it, not a random generator",
        ),
        (
            {"walk": Walk(random.Random(0)), "asked": Asked()},
            "walk/rng: must be a PCG64, .* got a Random",
        ),
        (
            {"walk": Walk(np.random.Generator(np.random.Philox())), "asked": Asked()},
            "walk/rng: .* got a Philox",
        ),
    ],
    ids=["name", "attribute", "kind", "kind of generator", "kind of bits"],
)
def test_a_state_that_does_not_fit_is_named_before_the_first_step(kept, text, tmp_path):
    with run_of(4, tmp_path, walk=Walk(), asked=Asked()) as run:
        for step in run:
            run.train_step(DATA[step])
    with pytest.raises(Exception, match=text) as caught, run_of(8, tmp_path, **kept) as run:
        next(run)
    assert isinstance(caught.value, ValueError)
    assert jstep.Saver(tmp_path).latest_step() == 4
