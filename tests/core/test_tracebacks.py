"""Errors of the user's code show at most two frames of jstep between the user's frames, as JAX
leaves out its own."""

import bdb
import contextlib
import dataclasses
import gc
import os
import threading
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PACKAGE = os.path.join(os.path.dirname(jstep.__file__), "")
SGD = jstep.gradient_descent(0.1)
PARAMS = {"w": jnp.ones(3)}
ROWS = np.ones((4, 3), np.float32)


class UserError(Exception):
    pass


def boom(*args, **kwargs):
    raise UserError("of the user")


def good(params, *args):
    return jnp.sum(params["w"] ** 2)


def fails(params, *args):
    return boom()


def state(optimizer=SGD, **kwargs):
    return jstep.TrainState.create(PARAMS, optimizer, **kwargs)


def in_step(optimizer, loss=good, *args, **kwargs):
    jstep.minimize(loss, optimizer, **kwargs)(state(optimizer), *args)


def run(step=None, data=lambda n: ROWS, last_step=4, optimizer=SGD, **kwargs):
    step = jstep.minimize(good, optimizer) if step is None else step
    return jstep.train(step, state(optimizer), data, last_step, progress=False, **kwargs)


def run_with(*hooks):
    run(hooks=hooks)


def hook(method):
    return type("Own", (jstep.Hook,), {method: boom})()


def custom(state, *args):
    return jstep.minimize(fails, SGD)(state, *args)


class Loader:
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        yield from [ROWS] * self.length
        boom()


class Items:
    def __len__(self):
        return 8

    def __getitem__(self, row):
        return boom() if row == 5 else ROWS[0]


class Evaluating(jstep.EvaluationHook):
    def _when_due(self, step, state, metrics):
        return super()._when_due(step, state, metrics)


def on_explicit_axes(step):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    step(jstep.shard_state(state(), mesh), ROWS)


def coordinated():
    coordinator = jstep.Coordinator()
    runner = jstep.QueueRunner(jstep.FIFOQueue(4), [boom])
    coordinator.join(runner.create_threads(coordinator, start=True))


RULE = jstep.leafwise(boom, hyper={"learning_rate": 0.1})
CHAIN = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.cautious(RULE))
RATE = jstep.times(jstep.linear_warmup(jstep.join([boom, 0.1], [5]), 3), 0.5)
CUSTOM = jstep.Optimizer(lambda params, global_step=0: {}, boom, lambda step: {})
LOSS = jstep.minimize(fails, SGD)
PLAIN = jstep.minimize(good, SGD)

CALLS = {
    "a loss": lambda: LOSS(state(), ROWS),
    "a loss, in a jit of the user's": lambda: jax.jit(jstep.minimize(fails, SGD, jit=False))(
        state()
    ),
    "a loss in lanes": lambda: in_step(SGD, fails, ROWS, lanes=2),
    "a loss in scan_steps": lambda: jstep.scan_steps(LOSS)(state(), ROWS),
    "a loss on Explicit axes": lambda: on_explicit_axes(LOSS),
    "a loss, in train": lambda: run(LOSS),
    "a loss, in cost": lambda: jstep.cost(LOSS, state(), ROWS),
    "a loss, in find_nonfinite": lambda: jstep.find_nonfinite(LOSS, state(), ROWS),
    "gradients": lambda: jstep.gradients(boom, PARAMS),
    "weight_fn": lambda: in_step(SGD, good, ROWS, weight_fn=boom, num_microbatches=2),
    "a custom step": lambda: jstep.TrainStep(boom)(state()),
    "a schedule": lambda: in_step(jstep.adam(RATE)),
    "a schedule, by hand": lambda: RATE(3),
    "a rule, in train": lambda: run(optimizer=CHAIN),
    "a rule, by hand": lambda: CHAIN.update(PARAMS, {}, PARAMS, 0),
    "a custom optimizer": lambda: run(optimizer=CUSTOM),
    "slots": lambda: state(jstep.leafwise(boom, hyper={}, slots=boom)),
    "labels": lambda: jstep.partition({"all": SGD}, boom).init(PARAMS),
    "a hook's before_step": lambda: run_with(hook("before_step")),
    "a hook's after_step": lambda: run_with(hook("after_step")),
    "a function of every": lambda: run_with(jstep.every(2, boom)),
    "a loader, later": lambda: run(data=Loader(3)),
    "rows, read ahead": lambda: run(data=jstep.batches(Items(), 2, shuffle=False)),
    "prefetch_to_device": lambda: next(jstep.prefetch_to_device(Loader(0))),
    "replayed": lambda: run(data=jstep.replayed(boom)),
    "from_state": lambda: run(data=jstep.from_state(boom)),
    "a queue": coordinated,
    "a metric function": lambda: jstep.evaluator(boom, [ROWS])(state()),
    "a loader of an evaluation": lambda: jstep.evaluator(
        lambda params, x: {"loss": jnp.sum(x)}, Loader(1)
    )(state()),
    "an evaluator, in train": lambda: run_with(
        jstep.EvaluationHook(jstep.evaluator(boom, [ROWS]), every_n_steps=2)
    ),
    "a callback": lambda: run_with(
        jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=2, callbacks=[boom])
    ),
    "specs": lambda: jstep.shard_state(state(), jax.make_mesh((1,), ("data",)), boom),
}
WITH_ANOTHER_FRAME = {
    "a step in a custom step": lambda: jstep.TrainStep(custom)(state(), ROWS),
    "a step in a custom step, in train": lambda: run(custom),
    "a compiled step in a compiled one, in train": lambda: run(jstep.TrainStep(custom)),
    "a hook of a class of jstep's": lambda: run_with(Evaluating(boom, every_n_steps=2)),
}
QUICK = [
    "a loss in lanes",
    "a loss on Explicit axes",
    "a loss, in train",
    "a schedule",
    "a schedule, by hand",
    "a rule, by hand",
    "a hook's after_step",
    "a loader, later",
    "prefetch_to_device",
    "a metric function",
]


@pytest.fixture
def filtering():
    before = jax.config.jax_traceback_filtering
    yield lambda mode: jax.config.update("jax_traceback_filtering", mode)
    jax.config.update("jax_traceback_filtering", before)


def raised(call, kind=UserError):
    with pytest.raises(kind) as error:
        call()
    return error.value


def frames_of(error):
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def counts(error):
    """The numbers of shown frames of jstep between those of the user, and after the last one."""
    found = [0]
    for frame in frames_of(error):
        file = frame.f_code.co_filename
        if file == __file__:
            found.append(0)
        elif file.startswith(PACKAGE):
            found[-1] += 1
    return found


@pytest.mark.thorough(except_for=QUICK)
@pytest.mark.parametrize("name", CALLS)
def test_two_frames(name):
    error = raised(CALLS[name])
    assert [n for n in counts(error) if n] in ([1], [2])
    assert frames_of(error)[-1].f_code is boom.__code__


@pytest.mark.parametrize("name", WITH_ANOTHER_FRAME)
def test_two_frames_for_each_that_the_user_calls(name):
    assert [n for n in counts(raised(WITH_ANOTHER_FRAME[name])) if n] == [2, 2]


@pytest.mark.thorough(except_for=["a loss", "a hook's after_step"])
@pytest.mark.parametrize(
    "name", ["a loss", "a rule, in train", "a hook's after_step", "a loader, later", "a queue"]
)
def test_the_setting_of_jax(name, filtering):
    filtering("off")
    assert max(counts(raised(CALLS[name]))) > 2
    filtering("remove_frames")
    removed = raised(CALLS[name])
    assert max(counts(removed)) == 2
    # The cause is JAX's own error, which has all of them.
    assert removed.__cause__ is None or max(counts(removed.__cause__)) > 2
    filtering("auto")
    assert max(counts(raised(CALLS[name]))) == 2


def test_a_debugger_stops_in_the_function_of_the_user():
    def loss(params, x):
        here = x.shape
        raise UserError(here)

    error = raised(lambda: run(jstep.minimize(loss, SGD)))
    stack, last = bdb.Bdb().get_stack(None, error.__traceback__)
    assert stack[last][0].f_locals["here"] == error.args[0] == (4, 3)


def test_causes_contexts_and_parts_stay_and_are_short():
    def loss(params, x):
        try:
            boom()
        except UserError as error:
            raise ValueError("of the user") from error

    error = raised(lambda: jstep.minimize(loss, SGD)(state(), ROWS), ValueError)
    assert str(error) == "of the user"
    assert isinstance(error.__cause__, UserError)
    assert [frame.f_code.co_name for frame in frames_of(error.__cause__)] == ["loss", "boom"]

    def group(state, x):
        errors = [raised(lambda: in_step(SGD, fails)), KeyError("x")]
        raise BaseExceptionGroup("several", errors)

    several = raised(lambda: run(group), BaseExceptionGroup)
    assert max(counts(several)) == max(counts(several.exceptions[0])) == 2

    def while_another(step):
        try:
            CALLS["a loss"]()
        finally:
            raise KeyError(step)

    assert max(counts(raised(lambda: run(data=while_another), KeyError).__context__)) == 2


def test_errors_of_all_kinds():
    def interrupted(step, state, metrics):
        raise KeyboardInterrupt

    assert (
        max(counts(raised(lambda: run(hooks=[jstep.every(1, interrupted)]), KeyboardInterrupt)))
        == 2
    )
    assert max(counts(raised(lambda: run(data=[]), ValueError))) == 2  # jstep's own


def test_an_error_that_is_raised_twice_does_not_grow():
    coordinator = jstep.Coordinator()

    def work():
        with coordinator.stop_on_exception():
            boom()

    threads = [threading.Thread(target=work)]
    threads[0].start()
    first = raised(lambda: coordinator.join(threads))
    assert counts(first) == [0, 0, 2, 0, 0]
    for again in (lambda: coordinator.join(), lambda: coordinator.raise_requested_exception()):
        assert raised(again) is first
        assert counts(first) == [0, 0, 2, 0, 0]

    stored = UserError("stored")

    def twice(params):
        raise stored.with_traceback(None)

    assert counts(raised(lambda: in_step(SGD, twice))) == counts(
        raised(lambda: in_step(SGD, twice))
    )


@pytest.mark.thorough(
    except_for=["a loss-ahead-one", "a loss-made by step-3", "a jitted step-ahead-auto"]
)
@pytest.mark.parametrize(
    "options", [{}, {"steps_per_call": 3}, {"steps_per_call": "auto"}], ids=["one", "3", "auto"]
)
@pytest.mark.parametrize(
    "data", [lambda n: ROWS, jstep.batches(ROWS, 2)], ids=["made by step", "ahead"]
)
@pytest.mark.parametrize(
    ("make", "traced"),
    [(lambda fn: jstep.minimize(fn, SGD), 2), (jax.jit, 3), (lambda fn: fn, 3)],
    ids=["a loss", "a jitted step", "a step"],
)
def test_an_error_that_is_raised_by_each_trace_does_not_grow(make, traced, data, options):
    stored, traces = UserError("stored"), []

    def again(state, batch):
        traces.append(batch)
        raise stored

    assert raised(lambda: run(make(again), data, **options)) is stored
    assert [n for n in counts(stored) if n] == [2]
    assert len(traces) <= traced
    notes = [line for line in stored.__notes__ if line.startswith("jstep: at step 0")]
    assert len(notes) == 1, "which batch it was"
    assert len(stored.__notes__) <= 2, "JAX's own, too"


KEEPING = {
    "a loss": lambda state: LOSS(state, ROWS),
    "a loss in lanes": lambda state: jstep.minimize(fails, SGD, lanes=2)(state, ROWS),
    "a loss, in train": lambda state: jstep.train(LOSS, state, lambda n: ROWS, 4, progress=False),
    "a hook": lambda state: jstep.train(
        PLAIN, state, lambda n: ROWS, 4, hooks=[jstep.every(1, boom)], progress=False
    ),
}


@pytest.mark.thorough(except_for=["a loss-auto", "a loss in lanes-auto", "a hook-auto"])
@pytest.mark.parametrize("mode", ["auto", "remove_frames", "off"])
@pytest.mark.parametrize("name", KEEPING)
def test_errors_keep_nothing_alive(name, mode, filtering):
    filtering(mode)
    given = state()
    kept = weakref.ref(given.params["w"])
    gc.disable()  # without a cycle, the last reference frees it
    try:
        with contextlib.suppress(UserError):
            KEEPING[name](given)
        del given
        assert kept() is None
    finally:
        gc.enable()


class NoAttributesError(Exception):
    def __setattr__(self, name, value):
        raise TypeError("takes no attributes")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    line: int


def refusing(kind):
    def refuse(*args, **kwargs):
        raise kind(7)

    return refuse


REFUSED_IN = {
    "a loader": lambda fn: run(data=lambda n: fn() if n == 2 else ROWS),
    "a prefetched loader": lambda fn: list(jstep.prefetch_to_device(map(fn, [0]))),
    "a hook": lambda fn: run(hooks=[jstep.every(2, fn)]),
    "a loss": lambda fn: in_step(SGD, fn),
    "a loss in a run": lambda fn: run(jstep.minimize(fn, SGD)),
    "an evaluation": lambda fn: run(hooks=[jstep.EvaluationHook(fn, every_n_steps=2)]),
    "an evaluator": lambda fn: jstep.evaluator(fn, [ROWS])(state()),
    "a schedule": lambda fn: jstep.adam(fn).hyperparameters(0),
    "a label": lambda fn: state(jstep.partition({"a": SGD}, fn)),
}


@pytest.mark.parametrize("call", REFUSED_IN.values(), ids=REFUSED_IN)
@pytest.mark.parametrize("kind", [NoAttributesError, FrozenError])
def test_an_error_that_takes_no_attributes_is_raised_itself(kind, call):
    """`contextlib` sets the traceback of each error that passes through it, which such a class
    refuses."""
    with pytest.raises(kind) as caught:
        call(refusing(kind))
    assert caught.value.args == (7,) or caught.value.line == 7
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "refuse"
