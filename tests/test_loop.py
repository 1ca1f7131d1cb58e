"""`train`: where it starts and ends, what it passes on, what it leaves behind."""

import logging
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.hooks.hook import NEVER

OPTIMIZER = jstep.with_moving_average(
    jstep.adam(jstep.exponential_decay(0.1, 10, 0.9)), jstep.ExponentialMovingAverage(0.9)
)
DATA = jstep.batches({"x": np.arange(40.0, dtype=np.float32).reshape(20, 2)}, batch_size=4, seed=3)


def loss_fn(params, batch, rng):
    noise = jax.random.normal(rng, params["w"].shape)
    return jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2) + jnp.sum(noise * params["w"])


STEP = jstep.minimize(loss_fn, OPTIMIZER, rng=jax.random.key(7))


def make_state(step=0):
    return jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER, global_step=step)


def train(last_step, batches=DATA, hooks=(), state=None, step=STEP, **kwargs):
    kwargs.setdefault("progress", False)
    state = make_state() if state is None else state
    return jstep.train(step, state, batches, last_step=last_step, hooks=hooks, **kwargs)


def by_hand(steps, state=None):
    state = make_state() if state is None else state
    for n in range(jstep.global_step(state), steps):
        state, _ = STEP(state, DATA[n])
    return state


def same(a, b):
    leaves = jax.tree.leaves(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))
    return all(leaves)


class Calls(jstep.Hook):
    """Writes down what the loop calls."""

    def __init__(self, every_n=None, fail=None, stop=None):
        self.every_n, self.fail, self.stop = every_n, fail, stop
        self.seen, self.metrics = [], {}

    def note(self, *event):
        self.seen.append(event)
        if self.fail == event:
            raise RuntimeError(f"failed at {event}")

    def begin(self, state):
        self.note("begin", jstep.global_step(state))

    def after_first_call(self, step):
        self.note("first", step)

    def after_call(self, steps, metrics):
        self.note("call", steps.start, steps.stop - 1)

    def after_step(self, step, state, metrics):
        self.metrics[step] = metrics
        assert jstep.global_step(state) == step
        assert type(step) is int
        self.note("step", step)
        return step == self.stop

    def before_save(self, step):
        self.note("save", step)

    def end(self, step, state):
        assert jstep.global_step(state) == step
        self.note("end", step)

    def close(self):
        self.note("close")

    def next_due(self, step):
        return None if self.every_n is None else (step // self.every_n + 1) * self.every_n

    def steps(self, what="step"):
        return [event[1] for event in self.seen if event[0] == what]


def leftovers():
    """Threads that a run has left behind; those of libraries may linger for a moment."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = [thread.name for thread in threading.enumerate() if thread.name.startswith("jstep")]
        if not found:
            return []
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind():
    import signal

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    logger = logging.getLogger("jstep")
    setup = logger.level, logger.propagate, list(logger.handlers)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (logger.level, logger.propagate, list(logger.handlers)) == setup
    assert leftovers() == []


# Where it starts and ends


def test_it_is_the_plain_loop():
    assert same(train(12), by_hand(12))


def test_last_step_is_absolute():
    assert same(train(12, state=by_hand(5)), by_hand(12))
    state = by_hand(5)
    assert train(5, state=state) is state
    assert train(3, state=state) is state


def test_hooks_see_the_run_in_order():
    calls = Calls()
    train(3, hooks=[calls])
    assert calls.seen == [("begin", 0), ("first", 1), ("step", 1), ("step", 2), ("step", 3), ("end", 3), ("close",)]
    assert set(calls.metrics[2]) == {"loss", "learning_rate", "beta1", "beta2", "epsilon"}
    assert float(calls.metrics[2]["learning_rate"]) == pytest.approx(0.1 * 0.9**0.1)


def test_a_run_with_nothing_to_do_begins_and_ends():
    calls = Calls()
    train(0, hooks=[calls])
    train(4, hooks=[calls], state=make_state(4))
    assert calls.seen == [("begin", 0), ("end", 0), ("close",), ("begin", 4), ("end", 4), ("close",)]


def test_duck_typed_hooks():
    class OnlyEnd:
        def end(self, step, state):
            seen.append(step)

    class OnlySteps:
        def after_step(self, step, state, metrics):
            seen.append(step)

    seen = []
    train(2, hooks=(OnlyEnd(), OnlySteps()))
    assert seen == [1, 2, 2]


@pytest.mark.parametrize(("start", "expected"), [(0, [3, 6, 9]), (3, [6, 9]), (4, [6, 9]), (9, [])])
def test_a_hook_that_says_when_it_is_due(start, expected):
    calls = Calls(every_n=3)
    train(10, hooks=[calls], state=make_state(start))
    assert calls.steps() == expected


def test_a_due_step_that_is_not_later_is_refused():
    class Wrong(jstep.Hook):
        def next_due(self, step):
            return 2

    for steps_per_call in (1, 3):
        with pytest.raises(ValueError, match=r"Wrong.next_due\(2\) returned 2: must be a later step"):
            train(5, hooks=[Wrong()], steps_per_call=steps_per_call)


# Stopping


def test_a_true_result_stops_after_that_step():
    first, second = Calls(stop=4), Calls()
    state = train(10, hooks=[first, second])
    assert jstep.global_step(state) == 4
    assert second.steps() == [1, 2, 3, 4]  # the others still see it
    assert second.seen[-2:] == [("end", 4), ("close",)]
    assert same(state, by_hand(4))


def test_numpy_truth_stops_too():
    class Stop(jstep.Hook):
        def after_step(self, step, state, metrics):
            return np.bool_(step == 2)

    assert jstep.global_step(train(9, hooks=[Stop()])) == 2


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_stop_at_step(steps_per_call, tmp_path):
    hook = jstep.StopAtStepHook(last_step=6)
    for _ in range(2):  # restored there, it makes no step more
        state = train(50, hooks=[hook], checkpoint_dir=tmp_path, steps_per_call=steps_per_call)
        assert jstep.global_step(state) == 6
    state = train(50, hooks=[jstep.StopAtStepHook(num_steps=3)], checkpoint_dir=tmp_path)
    assert jstep.global_step(state) == 9


# Batches


class Counted:
    """An iterator with a position, of any kind."""

    def __init__(self, kind=int, slow=0.0):
        self.at, self.kind, self.slow = 0, kind, slow

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(self.slow)
        self.at += 1
        return DATA[self.at - 1]

    def get_state(self):
        return {int: self.at, bytes: b"%d" % self.at, dict: {"at": self.at}}[self.kind]

    def set_state(self, state):
        self.at = int(state["at"] if self.kind is dict else state)


SOURCES = {
    "indexed": lambda: DATA,
    "list": lambda: [DATA[n] for n in range(30)],
    "function": lambda: DATA.__getitem__,
    "generator": lambda: (DATA[n] for n in range(30)),
    "iterator of batches": lambda: iter(DATA),
    "position": Counted,
    "bytes position": lambda: Counted(bytes),
    "slow": lambda: Counted(slow=0.0005),
    "arguments": lambda: lambda step: (DATA[step],),
    "jax arrays": lambda: lambda step: {"x": jnp.asarray(DATA[step]["x"])},
    "prefetched": lambda: jstep.prefetch_to_device(DATA.from_step(0)),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_all_sources_give_the_same_run(name, steps_per_call):
    batches = SOURCES[name]()
    state = train(12, batches, steps_per_call=steps_per_call)
    if steps_per_call == 1:
        assert same(state, by_hand(12))
    else:
        np.testing.assert_allclose(state.params["w"], by_hand(12).params["w"], rtol=1e-5)
    if hasattr(batches, "close"):
        batches.close()


@pytest.mark.parametrize("name", ["indexed", "list", "function", "position", "bytes position", "slow"])
@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_all_sources_with_a_position_resume(name, steps_per_call, tmp_path):
    kwargs = {"checkpoint_dir": tmp_path, "steps_per_call": steps_per_call}
    train(7, SOURCES[name](), **kwargs)
    state = train(14, SOURCES[name](), **kwargs)
    whole = train(14, SOURCES[name](), steps_per_call=steps_per_call, hooks=[Calls(every_n=7)])
    assert same(state, whole)


def test_a_position_of_a_dict_that_lives_on(tmp_path):
    class Shared(Counted):
        def __init__(self):
            super().__init__(dict, slow=0.0005)  # made ahead
            self.state = {"at": 0}

        def __next__(self):
            batch = super().__next__()
            self.state["at"] = self.at
            return batch

        def get_state(self):
            return self.state

    train(7, Shared(), checkpoint_dir=tmp_path)
    assert jstep.Saver(tmp_path).extra() == {"batches": {"value": {"at": 7}}}


def test_a_grain_loader_resumes(tmp_path):
    grain = pytest.importorskip("grain")

    def loader():
        rows = grain.MapDataset.range(100).shuffle(seed=1).map(lambda i: {"x": np.float32([i, 1]) / 100})
        return rows.repeat().batch(4).to_iter_dataset()

    train(7, loader(), checkpoint_dir=tmp_path)
    assert same(train(14, loader(), checkpoint_dir=tmp_path), train(14, loader()))


def test_a_source_that_changed_says_so(tmp_path, caplog):
    train(3, DATA, checkpoint_dir=tmp_path)
    train(6, Counted(), checkpoint_dir=tmp_path)
    assert "no position for the Counted" in caplog.text
    train(9, (DATA[n] for n in range(20)), checkpoint_dir=tmp_path)
    assert "a generator has no position" in caplog.text


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("slow", [0, 0.0005])
def test_where_the_batches_end_the_run_ends(steps_per_call, slow, tmp_path):
    def six():
        for n in range(6):
            time.sleep(slow)
            yield DATA[n]

    calls = Calls()
    state = train(100, six(), hooks=[calls], steps_per_call=steps_per_call, checkpoint_dir=tmp_path)
    assert jstep.global_step(state) == 6
    assert calls.seen[-3:] == [("end", 6), ("save", 6), ("close",)]
    assert jstep.Saver(tmp_path).all_steps() == [6]


def test_no_batches_at_all():
    calls = Calls()
    assert jstep.global_step(train(5, [], hooks=[calls])) == 0
    assert calls.seen == [("begin", 0), ("end", 0), ("close",)]


def test_epochs_end_the_run():
    data = jstep.batches({"x": np.ones((20, 2), np.float32)}, batch_size=4, num_epochs=2)
    assert jstep.global_step(train(1000, data)) == 10


def test_an_error_of_the_batches_comes_out():
    def broken(step):
        if step == 6:
            raise OSError("no such shard")
        time.sleep(0.001)
        return DATA[step]

    calls = Calls()
    with pytest.raises(OSError, match="no such shard"):
        train(10, broken, hooks=[calls])
    assert calls.steps() == [1, 2, 3, 4, 5, 6]
    assert calls.seen[-1] == ("close",)


def test_tuples_are_arguments():
    seen = []

    def step(state, *args):
        seen.append(args)
        return jstep.increment_global_step(state), {}

    train(3, [(1, 2), {"x": 3}, [4, 5]], step=step)
    assert jax.tree.map(int, seen) == [(1, 2), ({"x": 3},), ([4, 5],)]


@pytest.mark.parametrize("slow", [0, 0.001])
def test_a_plain_step_sees_the_same_arrays_ahead_or_not(slow):
    """Whether batches are made ahead depends on time; what comes of them must not."""
    kinds = set()

    def step(state, x):
        kinds.add((type(x).__name__, str(x.dtype)))
        return jstep.increment_global_step(state), {}

    def batches(n):
        time.sleep(slow)
        return np.full(2, n / 3)

    train(8, batches, step=step)
    assert kinds == {("ArrayImpl", "float32")}


def test_batch_sharding():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for steps_per_call in (1, 3):
        state = train(6, batch_sharding=sharding, steps_per_call=steps_per_call)
        np.testing.assert_allclose(state.params["w"], by_hand(6).params["w"], rtol=1e-5)


# Several steps a call


def test_calls_end_where_hooks_are_due():
    calls = Calls(every_n=7)
    train(25, hooks=[calls], steps_per_call=5)
    made = [event[1:] for event in calls.seen if event[0] == "call"]
    assert made == [(1, 5), (6, 7), (8, 12), (13, 14), (15, 19), (20, 21), (22, 25)]
    assert calls.steps() == [7, 14, 21]
    assert ("first", 5) in calls.seen


def test_a_hook_without_due_steps_is_called_after_every_call():
    calls = Calls()
    train(10, hooks=[calls], steps_per_call=4)
    assert calls.steps() == [4, 8, 10]


@pytest.mark.parametrize("start", [0, 2, 6])
def test_saves_land_on_their_steps_though_seconds_are_given_too(start, tmp_path):
    train(20, state=make_state(start), checkpoint_dir=tmp_path, save_checkpoint_steps=6, steps_per_call=10)
    assert jstep.Saver(tmp_path).all_steps() == [n for n in (6, 12, 18, 20) if n > start]


def test_metrics_are_those_of_the_last_step_of_the_call():
    single, several = Calls(every_n=3), Calls(every_n=3)
    train(7, hooks=[single])
    train(7, hooks=[several], steps_per_call=3)
    for step in (3, 6):
        assert set(single.metrics[step]) == set(several.metrics[step])
        for name, value in single.metrics[step].items():
            assert several.metrics[step][name].shape == ()
            np.testing.assert_allclose(several.metrics[step][name], value, rtol=1e-4)


def test_more_steps_a_call_than_there_are():
    np.testing.assert_allclose(train(3, steps_per_call=100).params["w"], by_hand(3).params["w"], rtol=1e-5)


def test_ragged_batches_cannot_be_stacked():
    with pytest.raises(ValueError, match=r"steps_per_call: batches of different shapes .* at 'x'"):
        train(4, lambda n: {"x": np.ones((4 - n % 2, 2), np.float32)}, steps_per_call=2)


def test_a_plain_function_is_compiled_once_for_several_steps(compilations):
    @jax.jit
    def step(state, x):
        return state.replace(params={"w": state.params["w"] + x}, global_step=state.global_step + 1), {"x": x}

    train(4, lambda n: np.ones(2, np.float32), step=step, steps_per_call=2)
    state = make_state()
    with compilations() as seen:
        result = train(20, lambda n: np.ones(2, np.float32), step=step, steps_per_call=2, state=state)
    assert seen == []
    assert result.params["w"].tolist() == [21, 21]
    assert state.params["w"].tolist() == [1, 1]  # of a plain function nobody expects that it takes it over


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_several_runs_compile_once(compilations, steps_per_call):
    step = jstep.minimize(loss_fn, OPTIMIZER, rng=jax.random.key(7))
    train(8, step=step, steps_per_call=steps_per_call, hooks=[Calls(every_n=4)])
    state = make_state()
    with compilations() as seen:
        train(16, step=step, steps_per_call=steps_per_call, hooks=[Calls(every_n=4)], state=state)
    assert seen == []


def test_ahead_and_direct_batches_share_what_is_compiled(compilations):
    state = make_state()
    train(3, lambda n: DATA[n])
    with compilations() as seen:
        train(20, Counted(slow=0.0005), state=state)
    assert seen == []


# Checkpoints


def test_resuming_changes_nothing(tmp_path):
    for last_step in (1, 5, 6, 12):
        state = train(last_step, checkpoint_dir=tmp_path)
    assert same(state, by_hand(12))


def test_saves_on_the_way_and_at_the_end(tmp_path):
    train(11, checkpoint_dir=tmp_path, checkpoint_prefix="net", save_checkpoint_steps=4)
    assert sorted(os.listdir(tmp_path)) == ["net-11", "net-4", "net-8"]
    train(11, checkpoint_dir=tmp_path, checkpoint_prefix="other")
    assert jstep.Saver(tmp_path, prefix="other").all_steps() == [11]


def test_saves_by_the_clock(tmp_path):
    def batches(step):
        time.sleep(0.02)
        return DATA[step]

    train(8, batches, checkpoint_dir=tmp_path, save_checkpoint_secs=1e-6)
    assert jstep.Saver(tmp_path).all_steps() == [4, 5, 6, 7, 8]  # five are kept
    train(20, batches, checkpoint_dir=tmp_path, save_checkpoint_secs=None)
    assert jstep.Saver(tmp_path).all_steps() == [5, 6, 7, 8, 20]


def test_a_finished_run_writes_nothing_again(tmp_path):
    train(5, Counted(), checkpoint_dir=tmp_path)
    before = os.stat(tmp_path / "model-5").st_mtime_ns, os.stat(tmp_path / "model-5").st_ino
    state = train(5, DATA, checkpoint_dir=tmp_path)
    assert same(state, by_hand(5))
    assert (os.stat(tmp_path / "model-5").st_mtime_ns, os.stat(tmp_path / "model-5").st_ino) == before
    assert jstep.Saver(tmp_path).extra() == {"batches": {"value": 5}}


def test_extra_of_another_kind_is_no_position(tmp_path):
    with jstep.Saver(tmp_path) as saver:
        saver.save(by_hand(3), extra=["not", "a", "dict"])
    assert same(train(6, checkpoint_dir=tmp_path), by_hand(6))


def test_a_checkpoint_that_does_not_fit(tmp_path):
    train(3, checkpoint_dir=tmp_path)
    other = jstep.TrainState.create({"v": jnp.ones(2)}, OPTIMIZER)
    with pytest.raises(ValueError, match="params/v"):
        train(6, state=other, checkpoint_dir=tmp_path)
    assert jstep.Saver(tmp_path).all_steps() == [3]


def test_a_saver_hook_of_ones_own(tmp_path):
    train(7, hooks=[jstep.CheckpointSaverHook(tmp_path, save_steps=3)])
    assert jstep.Saver(tmp_path).all_steps() == [3, 6, 7]


# Hooks that fail


@pytest.mark.parametrize(
    "event", [("begin", 0), ("first", 1), ("step", 1), ("step", 5), ("step", 6), ("save", 6), ("end", 8), ("close",)]
)
@pytest.mark.parametrize("slow", [0, 0.0005])
def test_a_hook_that_raises_leaves_the_last_checkpoint(event, slow, tmp_path):
    calls, other = Calls(fail=event), Calls()
    with pytest.raises(RuntimeError, match="failed at"):
        train(
            8, Counted(slow=slow), hooks=[other, calls], checkpoint_dir=tmp_path / "c", save_checkpoint_steps=3,
            logdir=tmp_path / "l", save_summaries_steps=2,
        )  # fmt: skip
    assert other.seen[-1] == calls.seen[-1] == ("close",)
    assert other.steps("end") == ([8] if event[0] in ("end", "close") else [])
    saver = jstep.Saver(tmp_path / "c")
    last = {"begin": None, "first": None, "save": 3, "end": 6, "close": 8}.get(event[0])
    if event[0] == "step":
        last = {1: None, 5: 3, 6: 3}[event[1]]
    assert saver.latest_step() == last
    if last is not None:
        assert same(saver.restore(make_state()), by_hand(last))
        assert same(train(8, Counted(), checkpoint_dir=tmp_path / "c"), by_hand(8))


def test_a_step_that_raises():
    def step(state, batch):
        raise FloatingPointError("in the step")

    calls = Calls()
    with pytest.raises(FloatingPointError):
        train(3, hooks=[calls], step=step)
    assert calls.seen == [("begin", 0), ("close",)]


def test_the_error_under_way_is_the_one_to_see(tmp_path, monkeypatch):
    """A save that fails in the background while another error leaves."""
    from jstep.checkpoint import CheckpointError

    def close(self):
        raise CheckpointError("the disk is full")

    calls = Calls(fail=("step", 2))
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="failed at") as caught:  # noqa: PT012
        patched.setattr(jstep.Saver, "close", close)
        train(3, hooks=[calls], checkpoint_dir=tmp_path)
    assert "the disk is full" in caught.value.__notes__[0]


def test_a_failed_save_at_the_end_is_an_error(tmp_path):
    (tmp_path / "c").write_text("a file")
    with pytest.raises(NotADirectoryError):
        train(3, checkpoint_dir=tmp_path / "c")


# NaN


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_nan_is_named_and_never_saved(steps_per_call, tmp_path):
    def batches(n):
        return {"x": np.full((4, 2), np.nan if n == 8 else 1.0, np.float32)}

    with pytest.raises(jstep.NanLossDuringTrainingError, match=r"loss is nan at step 9 \(the update 8 → 9\)") as caught:
        train(
            100, batches, hooks=[jstep.NanLossHook(50)], checkpoint_dir=tmp_path, save_checkpoint_steps=4,
            steps_per_call=steps_per_call,
        )  # fmt: skip
    assert caught.value.step == 9
    saver = jstep.Saver(tmp_path)
    assert saver.all_steps() == [4, 8]
    assert np.isfinite(saver.restore(make_state()).params["w"]).all()


@pytest.mark.parametrize("every_n_steps", [1, 3, 50])
def test_a_nan_without_an_error_ends_the_run_unsaved(every_n_steps, tmp_path, caplog):
    def batches(n):
        return {"x": np.full((4, 2), np.nan if n == 8 else 1.0, np.float32)}

    calls = Calls()
    hook = jstep.NanLossHook(every_n_steps, fail_on_nan_loss=False)
    state = train(100, batches, hooks=[hook, calls], checkpoint_dir=tmp_path, save_checkpoint_steps=4)
    assert 9 <= jstep.global_step(state) <= 15
    assert calls.steps("end") == [jstep.global_step(state)]
    assert jstep.Saver(tmp_path).all_steps() == [4, 8]
    assert "nan at step 9" in caplog.text


# Bad input


def no_step():
    return make_state().replace(global_step=None)


WRONG = [
    ({"step": 3}, TypeError, r"train_step=3: must be a function \(state, \*args\) -> \(state, metrics\)"),
    ({"state": {"w": 1}}, TypeError, "state: must be a TrainState, got dict; make one with TrainState.create"),
    ({"last_step": 1e4}, TypeError, "last_step=10000.0: must be an integer, got float"),
    ({"last_step": True}, TypeError, "last_step=True: must be an integer"),
    ({"last_step": -1}, ValueError, "last_step=-1: must be at least 0"),
    ({"steps_per_call": 0}, ValueError, "steps_per_call=0: must be at least 1"),
    ({"steps_per_call": 2.0}, TypeError, "steps_per_call=2.0: must be an integer"),
    ({"batches": None}, TypeError, r"batches=None: must have batches\[N\], be a function of the step, or be iterable"),
    ({"batches": {"x": np.ones(3)}}, TypeError, "batches is a dict, which may be one batch"),
    ({"hooks": [jstep.LoggingHook]}, TypeError, r"hooks\[0\]=LoggingHook is a class; give an instance: LoggingHook\("),
    ({"hooks": [print]}, TypeError, r"hooks\[0\]=<built-in function print>: has none of begin, after_step"),
    ({"hooks": jstep.LoggingHook(1)}, TypeError, r"hooks=<.*LoggingHook.*: must be a sequence of hooks, hooks=\[...\]"),
    ({"hooks": 3}, TypeError, "hooks=3: must be a sequence of hooks, got int"),
    ({"save_checkpoint_steps": 0}, ValueError, "save_checkpoint_steps=0: must be at least 1"),
    ({"save_checkpoint_secs": -5}, ValueError, "save_checkpoint_secs=-5: must be > 0"),
    ({"save_checkpoint_secs": "600"}, TypeError, "save_checkpoint_secs='600': must be a number of seconds"),
    ({"save_summaries_steps": 0}, ValueError, "save_summaries_steps=0: must be at least 1"),
    ({"log_steps": -5}, ValueError, "log_steps=-5: must be at least 1"),
    ({"log_steps": 2.5}, TypeError, "log_steps=2.5: must be an integer"),
    ({"checkpoint_prefix": "a/b"}, ValueError, "prefix"),
    ({"checkpoint_dir": 3}, TypeError, "directory"),
    ({"logdir": 3}, TypeError, "logdir must be a path"),
    ({"batch_sharding": "data"}, TypeError, "sharding: 'data'"),
    ({"state": no_step()}, RuntimeError, r"^Global step should be created to use StepCounterHook\.$"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG)
def test_bad_input_is_named_and_leaves_nothing(wrong, error, words, tmp_path):
    arguments = {"last_step": 3, "checkpoint_dir": tmp_path / "c"} | wrong
    with pytest.raises(error, match=words):
        train(**arguments)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda state: state, "it returned TrainState"),
        (lambda state: (state, {}, 3), "it returned tuple of 3"),
        (lambda state: (state, jnp.float32(1)), r"it returned \(TrainState, ArrayImpl\)"),
        (lambda state: ({}, {}), r"it returned \(dict, dict\)"),
    ],
)
def test_a_step_that_returns_something_else(result, words):
    with pytest.raises(TypeError, match=r"train_step must return \(state, metrics\).*" + words):
        train(3, step=lambda state, batch: result(state))


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_step_that_does_not_advance(steps_per_call, tmp_path):
    step = jstep.minimize(loss_fn, OPTIMIZER, rng=jax.random.key(7), increment_global_step=False)
    calls = Calls(every_n=100)
    words = "global_step is 0 after the update that makes step 2: train_step must advance it by one"
    with pytest.raises(ValueError, match=words):
        train(2, step=step, hooks=[calls], checkpoint_dir=tmp_path, steps_per_call=steps_per_call)
    assert calls.steps("end") == []  # success only
    assert os.listdir(tmp_path) == []


def test_numpy_integers_will_do():
    assert jstep.global_step(train(np.int64(3), steps_per_call=np.int32(2))) == 3


def test_hooks_may_be_any_iterable():
    calls = Calls()
    train(2, hooks=(hook for hook in [calls]))
    assert calls.steps() == [1, 2]


# Donation


def test_the_state_given_is_taken_over_by_a_compiled_step():
    state = make_state()
    train(2, state=state)
    with pytest.raises(RuntimeError, match="donated"):
        train(2, state=state)


def test_a_plain_step_leaves_it_alone():
    state = make_state()
    plain = jstep.minimize(loss_fn, OPTIMIZER, rng=jax.random.key(7), jit=False)
    trained = train(2, state=state, step=plain)
    assert state.params["w"].tolist() == [1, 1]
    np.testing.assert_allclose(trained.params["w"], by_hand(2).params["w"], rtol=1e-5)


def test_metrics_outlive_the_steps_after_them(tmp_path):
    """A step may return its own parameters as metrics; the next one donates the state, not the metrics."""
    step = jstep.minimize(
        lambda params, batch: (jnp.mean((batch["x"] @ params["w"]) ** 2), {"w0": params["w"]}), OPTIMIZER, has_aux=True
    )
    calls = Calls()
    train(5, hooks=[calls], step=step)
    assert np.asarray(calls.metrics[1]["w0"]).tolist() == [1, 1]
    assert len({np.asarray(calls.metrics[n]["w0"]).tobytes() for n in range(1, 6)}) == 5


def test_a_hook_may_keep_a_copy_of_the_state():
    class Keep(jstep.Hook):
        def after_step(self, step, state, metrics):
            kept[step] = jax.tree.map(jnp.copy, state)

    kept = {}
    train(4, hooks=[Keep()])
    assert same(kept[2], by_hand(2))


def test_a_saved_state_is_that_of_its_step(tmp_path):
    """Saving goes on in the background while the next steps take the memory over."""
    train(5, checkpoint_dir=tmp_path, save_checkpoint_steps=1)
    saver = jstep.Saver(tmp_path)
    for n in saver.all_steps():
        assert same(saver.restore(make_state(), step=n), by_hand(n))


# No waiting


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_the_host_never_waits_for_the_device(steps_per_call, tmp_path):
    """The device has a second of work in its first step; the loop goes on to hand out steps, log and summarize."""

    def work(w):
        w = jax.lax.fori_loop(0, 4000, lambda i, w: jnp.tanh(w @ w), jnp.full((256, 256), w[0]))
        return jnp.full(2, w[0, 0])

    @jax.jit
    def device_step(state, x):
        w = jax.lax.cond(state.global_step == 0, work, lambda w: w + x, state.params["w"])
        return state.replace(params={"w": w}, global_step=state.global_step + 1), {"loss": jnp.sum(w)}

    class Look(jstep.Hook):
        def after_step(self, step, state, metrics):
            first.setdefault("loss", metrics["loss"])
            busy[step] = not first["loss"].is_ready()

        def next_due(self, step):
            return step // 2 * 2 + 2

    def run(last_step):
        train(
            last_step, lambda n: np.float32(1), step=device_step, hooks=[jstep.NanLossHook(20), Look()], log_steps=2,
            logdir=tmp_path, save_summaries_steps=2, progress=None, steps_per_call=steps_per_call,
        )  # fmt: skip

    first, busy = {}, {}
    run(4)  # compiles
    first.clear()
    run(20)
    assert list(busy) == list(range(2, 21, 2))
    assert all(busy[step] for step in range(2, 17, 2))


# Logging and progress


def test_lines_are_seen_without_setting_up_logging(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    train(6, log_steps=2, progress=None)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2", "step 4", "step 6"]
    assert "loss " in lines[0]
    assert "learning_rate 0.0" in lines[1]
    assert "beta1" not in err
    assert "steps/s)" in lines[1]


def test_what_the_program_set_up_is_left_alone(capsys, caplog):
    caplog.set_level(logging.INFO)
    train(4, log_steps=2, progress=None)
    assert capsys.readouterr().err == ""
    assert [record.getMessage()[:6] for record in caplog.records if record.name == "jstep"] == ["step 2", "step 4"]


def test_a_file_for_warnings_still_gets_them(tmp_path, monkeypatch):
    """The root logger writes warnings to a file: lines go to the terminal, warnings to both."""
    file = logging.FileHandler(tmp_path / "log")
    monkeypatch.setattr(logging.getLogger(), "handlers", [file])
    train(3, checkpoint_dir=tmp_path / "c", progress=None)
    train(6, (DATA[n] for n in range(9)), checkpoint_dir=tmp_path / "c", progress=None, log_steps=1)
    file.close()
    text = (tmp_path / "log").read_text()
    assert "has no position to go on from" in text
    assert "step 5" not in text


@pytest.mark.parametrize("kwargs", [{"progress": False, "log_steps": 1}, {"progress": None, "log_steps": None}])
def test_silence(capsys, kwargs, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    train(4, **kwargs)
    assert capsys.readouterr() == ("", "")


def test_progress_line_on_request(capsys):
    pytest.importorskip("tqdm")
    train(6, progress=True, log_steps=1)
    err = capsys.readouterr().err
    assert "6/6" in err
    assert "loss " in err
    assert "step 2" not in err


class Terminal:
    def __init__(self, stream):
        self.stream = stream

    def isatty(self):
        return True

    def __getattr__(self, name):
        return getattr(self.stream, name)


def test_a_terminal_gets_the_line(capsys, monkeypatch):
    import sys

    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    train(6, progress=None, log_steps=1)
    err = capsys.readouterr().err
    assert "6/6" in err
    assert "step 2" not in err


def test_a_terminal_without_tqdm_gets_lines(capsys, monkeypatch):
    import sys

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    train(2, progress=None, log_steps=1)
    assert capsys.readouterr().err.count("step ") == 2


# Summaries


def points(logdir, purge=True):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(logdir), purge_orphaned_data=purge, size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore")
def test_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    calls = Calls(every_n=4)
    train(20, logdir=tmp_path, save_summaries_steps=4, log_steps=5, hooks=[calls])
    found = points(tmp_path)
    assert set(found) == {"loss", "learning_rate", "global_step/sec"}
    assert [step for step, _ in found["loss"]] == [4, 8, 12, 16, 20]
    assert [value for _, value in found["loss"]] == [float(calls.metrics[n]["loss"]) for n in (4, 8, 12, 16, 20)]
    assert [step for step, _ in found["global_step/sec"]] == [5, 10, 15, 20]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps_per_call", [1, 10])
def test_event_files_after_an_error_and_a_resume(tmp_path, steps_per_call):
    """Points past the checkpoint are written again; TensorBoard is told to drop the first ones."""
    pytest.importorskip("tensorboard")
    kwargs = {
        "checkpoint_dir": tmp_path / "c", "logdir": tmp_path / "l", "save_checkpoint_steps": 10,
        "save_summaries_steps": 2, "log_steps": None, "steps_per_call": steps_per_call,
    }  # fmt: skip
    with pytest.raises(RuntimeError):
        train(30, hooks=[Calls(every_n=16, fail=("step", 16))], **kwargs)
    time.sleep(1.1)  # event files are ordered by the second
    train(30, hooks=[Calls(every_n=16)], **kwargs)
    assert [step for step, _ in points(tmp_path / "l")["loss"]] == list(range(2, 31, 2))


def test_points_before_a_checkpoint_are_on_disk_with_it(tmp_path):
    """A run killed after the checkpoint does not write them again."""
    pytest.importorskip("tensorboard")
    from jstep.summary import summary_iterator

    seen = {}

    class Look(jstep.Hook):
        def after_step(self, step, state, metrics):
            for name in os.listdir(tmp_path / "l"):
                events = summary_iterator(str(tmp_path / "l" / name))
                seen[step] = [e.step for e in events if any(v.tag == "loss" for v in e.summary.value)]

    train(
        7, hooks=[Look()], checkpoint_dir=tmp_path / "c", save_checkpoint_steps=3, logdir=tmp_path / "l",
        save_summaries_steps=1, log_steps=None,
    )  # fmt: skip
    assert seen[4][:3] == [1, 2, 3]
    assert seen[7][:6] == [1, 2, 3, 4, 5, 6]


def test_summaries_made_in_the_step(tmp_path):
    pytest.importorskip("tensorboard")
    from jstep.summary import summary_iterator

    def loss(params, batch):
        value = jnp.mean((batch["x"] @ params["w"]) ** 2)
        return value, {"weights": jstep.summary.histogram("weights", params["w"], collections=())}

    step = jstep.minimize(loss, OPTIMIZER, has_aux=True)
    for steps_per_call in (1, 3):
        logdir = tmp_path / str(steps_per_call)
        train(6, step=step, logdir=logdir, save_summaries_steps=3, log_steps=None, steps_per_call=steps_per_call)
        (name,) = os.listdir(logdir)
        events = [(e.step, v.tag) for e in summary_iterator(str(logdir / name)) for v in e.summary.value]
        assert [step for step, tag in events if tag == "weights"] == [3, 6]
        assert [step for step, tag in events if tag == "loss"] == [3, 6]


def test_never_is_past_all_steps():
    assert jnp.iinfo(jnp.int64).max < NEVER
