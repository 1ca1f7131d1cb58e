"""SIGUSR1 and SIGHUP, the time limit, and the processes that a run forks."""

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from children import end, start
from loop_runs import DATA, train
from processes import printed, wait_for
from processes import start as start_all

import jstep
from jstep.loop import signals
from jstep.loop.saving import RunSaverHook
from jstep.loop.signals import StopSignals


def kill(number: int, at: int = 5) -> Any:
    """A hook that sends a signal to this process at a step."""
    return jstep.every(1, lambda step, *_: os.kill(os.getpid(), number) if step == at else None)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_saves_and_leaves_with_its_code(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    with pytest.raises(jstep.Preempted, match=f"{signal.Signals(number).name} stopped the run after step 5") as caught:
        train(50, hooks=[kill(number)], checkpoint_dir=tmp_path)
    assert caught.value.code == 128 + number
    assert jstep.Saver(tmp_path).all_steps() == [5]
    assert signal.getsignal(number) == before


def test_a_step_is_on_the_disk_before_it_is_called_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    save, stopped = RunSaverHook.save, StopSignals.stopped

    def saves(self: RunSaverHook, step: int, state: Any, *, wait: bool = False) -> bool:
        order.append((step, "waits" if wait else "goes on"))
        return save(self, step, state, wait=wait)

    def says(self: StopSignals, when: str) -> BaseException:
        order.append(when)
        return stopped(self, when)

    monkeypatch.setattr(RunSaverHook, "save", saves)
    monkeypatch.setattr(StopSignals, "stopped", says)
    with pytest.raises(jstep.Preempted):
        train(50, hooks=[kill(signal.SIGTERM)], checkpoint_dir=tmp_path)
    assert order == [(5, "waits"), "after step 5, which is saved; start the run again to resume"]


def test_a_limit_that_is_over_when_the_run_begins(tmp_path: Path) -> None:
    """Devices may take longer to start. The handlers of before are there again: later signals must not be ignored."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for _ in range(5):
        with pytest.raises(jstep.Preempted, match="stop_secs stopped the run before its first step") as caught:
            train(50, checkpoint_dir=tmp_path, stop_secs=1e-9)
        assert jstep.global_step(caught.value.state) == 0
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    with pytest.raises(jstep.Preempted, match="SIGTERM stopped the run after step 5"):
        train(50, hooks=[kill(signal.SIGTERM)], checkpoint_dir=tmp_path)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_that_is_ignored_or_handled_is_left_alone(number: int, tmp_path: Path) -> None:
    seen: list[int] = []
    for handler in (signal.SIG_IGN, lambda n, _: seen.append(n)):
        before = signal.signal(number, handler)  # type: ignore[arg-type]
        try:
            assert jstep.global_step(train(9, hooks=[kill(number)])) == 9
            assert signal.getsignal(number) == handler
        finally:
            signal.signal(number, before)
    assert seen == [number]


def test_a_handler_of_c_is_left_alone(tmp_path: Path) -> None:
    """`signal.getsignal` does not know it."""
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            assert jstep.global_step(train(9, hooks=[kill(signal.SIGUSR1)])) == 9
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        file.seek(0)
        assert "most recent call first" in file.read()


def test_under_nohup(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
def hang_up(step, state, metrics):
    os.kill(os.getpid(), signal.SIGHUP)
say("end", train(6, hooks=[jstep.every(2, hang_up)]).global_step)
"""
    assert end(start(script, tmp_path))[0] == "end 6\n"


def slowly(step: int) -> Any:
    time.sleep(0.005)
    return DATA[step]


def test_the_time_limit(tmp_path: Path) -> None:
    train(3)  # the limit counts compiling, too
    with pytest.raises(jstep.Preempted, match="stop_secs stopped the run after step") as caught:
        train(10**6, slowly, checkpoint_dir=tmp_path, stop_secs=2.0)
    assert caught.value.code == 143
    assert jstep.Saver(tmp_path).latest_step() == jstep.global_step(caught.value.state)
    assert jstep.global_step(train(3, checkpoint_dir=tmp_path / "short", stop_secs=600.0)) == 3


def test_a_limit_that_ends_after_a_signal_or_the_run_stops_nothing() -> None:
    stop = StopSignals(1000.0)
    stop.received = signal.SIGINT
    stop._expire()
    assert not stop._is_limit
    stop.received = None
    stop.end()
    stop._expire()
    assert (stop._is_limit, stop.received) == (False, None)
    stop.check()


def test_without_proc_a_signal_with_its_default_action_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(signals, "open", missing, raising=False)
    assert [signals._is_free(number) for number in (signal.SIGUSR1, signal.SIGINT)] == [True, False]


def test_the_time_limit_ends_a_wait(tmp_path: Path) -> None:
    def hangs(step: int) -> Any:
        if step == 4:
            time.sleep(60)
        return DATA[step]

    with pytest.raises(jstep.Preempted, match="stop_secs stopped the run after step 4"):
        train(9, hangs, checkpoint_dir=tmp_path, stop_secs=2)
    assert jstep.Saver(tmp_path).all_steps() == [4]


def test_the_time_limit_in_another_thread(tmp_path: Path) -> None:
    found: list[BaseException] = []
    train(3)  # the limit counts compiling, too

    def run() -> None:
        try:
            train(10**6, slowly, checkpoint_dir=tmp_path, stop_secs=2.0)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    (error,) = found
    assert isinstance(error, jstep.Preempted)
    assert jstep.Saver(tmp_path).latest_step() == jstep.global_step(error.state)


def test_a_limit_of_centuries_is_none(tmp_path: Path) -> None:
    script = 'say("end", train(6, stop_secs=1e12).global_step)'
    out, err = end(start(script, tmp_path))[:2]
    assert out == "end 6\n"
    assert "Traceback" not in err


FORKS = """
import multiprocessing, warnings
warnings.simplefilter("ignore")
FORK = multiprocessing.get_context("fork")

def child(*_):
    process = FORK.Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    process.terminate()  # at once: the child may not have set its handlers yet
    process.join(30)
    say(process.exitcode, signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None))
    process.kill()

def inner(step, *_):
    train(2, hooks=[jstep.every(2, child)])

def batch(step):
    if step == 3:
        child()
    return DATA[step]

train(4, hooks=[jstep.every(4, child)])
train(4, batch)
train(4, hooks=[jstep.every(4, inner)])
say(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_a_process_that_is_forked_in_a_run(tmp_path: Path) -> None:
    """It has the handlers of before: it can be ended. In a process of its own: others' threads may hold locks."""
    handled = f"{-signal.SIGTERM} False\n"  # by the run, which continues in the parent
    assert end(start(FORKS, tmp_path), timeout=120)[0] == 3 * handled + "set()\n"


@pytest.mark.filterwarnings("ignore")
def test_handlers_in_a_forked_process() -> None:
    """All of them are those of before, in the order in which runs were nested."""
    read, write = os.pipe()

    def child(*_: Any) -> None:
        if os.fork() == 0:
            names = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]
            os.write(write, repr([n == own for n, own in zip(names, mine, strict=True)]).encode())
            os._exit(0)
        os.wait()

    def own(number: int, frame: Any) -> None:
        sys.exit(7)

    mine: list[Any] = [own, signal.getsignal(signal.SIGINT), signal.SIG_DFL, signal.SIG_DFL]
    handler = signal.signal(signal.SIGTERM, own)
    try:
        train(2, hooks=[jstep.every(2, lambda *_: train(2, hooks=[jstep.every(2, child)]) and None)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert os.read(read, 100) == b"[True, True, True, True]"
    os.close(read)
    os.close(write)


@pytest.mark.thorough
def test_a_pool_that_is_open_when_a_run_ends(tmp_path: Path) -> None:
    script = """
import multiprocessing as mp, warnings
warnings.simplefilter("ignore")
def work(i):
    return i
class Loader:
    def __iter__(self):
        with mp.get_context("fork").Pool(2) as pool:
            while True:
                for i in pool.imap(work, range(8)):
                    yield DATA[i]
train(12, Loader())
say("returned")
"""
    assert end(start(script, tmp_path)) == ("returned\n", "")


def test_an_evaluation_at_the_start(tmp_path: Path) -> None:
    def run(last: int, **kwargs: Any) -> tuple[list[int], list[int]]:
        hook = jstep.EvaluationHook(
            lambda state: {"x": 1.0},
            every_n_steps=2,
            callbacks=[lambda step, *_: seen.append(step), jstep.EarlyStopping("x", 2, mode="max")],
            at_start=True,
            **kwargs,
        )
        seen: list[int] = []
        train(last, hooks=[hook], checkpoint_dir=tmp_path)
        return list(hook.results), seen

    assert run(4) == ([0, 2, 4], [0, 2, 4])  # off the cadence: early stopping counts 2 as the first one
    assert run(8) == ([6], [6])
    assert run(8) == ([6], [])


def test_an_evaluation_at_the_start_may_end_the_run() -> None:
    hook = jstep.EvaluationHook(lambda state: {"x": 1.0}, every_n_steps=2, callbacks=[lambda *_: True], at_start=True)
    assert jstep.global_step(train(4, hooks=[hook])) == 0


SEVERAL = """
class Slow(jstep.Hook):
    def after_step(self, n, state, metrics):
        time.sleep(0.02)
        if sys.argv[5] == "usr1" and process == 1 and n == 7:
            os.kill(os.getpid(), signal.SIGUSR1)
step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh)
stop_secs = 4.0 if sys.argv[5] == "stop_secs" else None
try:
    jstep.train(step, state, batches, 5000, hooks=[Slow()], checkpoint_dir=directory, progress=False,
                batch_sharding=rows, stop_secs=stop_secs)
except jstep.Preempted as error:
    print("raised", jstep.global_step(error.state), error, flush=True)
    raise
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["usr1", "stop_secs"])
def test_several_processes_leave_at_one_step(how: str, tmp_path: Path) -> None:
    ended = wait_for(start_all(SEVERAL, 2, tmp_path, how))
    first, second = (printed(one.out.split("\n"), "raised") for one in ended)
    assert [one.code for one in ended] == [138, 138] if how == "usr1" else [143, 143]
    assert first == second
    step, name, *_ = str(first).split()
    assert name == ("SIGUSR1" if how == "usr1" else "stop_secs")
    assert jstep.Saver(tmp_path).latest_step() == int(step)


LATE = """
from jstep.distributed import processes
from jstep.hooks.run_hook import RunHook
where, reached, has_ended = sys.argv[5], processes.reached_stop, False

class AtTheEnd(RunHook):
    def end(self, n, state):
        global has_ended
        has_ended = where == "end"
        if has_ended and process == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
    def close(self):
        if where == "close" and process == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

def after_the_service():  # which takes up to a second; the processes may ask it a different number of times
    while has_ended and not reached():
        time.sleep(0.01)
    return has_ended or reached()

processes.reached_stop = after_the_service
step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh)
try:
    state = jstep.train(step, state, batches, 5, hooks=[AtTheEnd()], checkpoint_dir=directory, progress=False,
                        batch_sharding=rows)
except jstep.Preempted as error:
    print("raised", jstep.global_step(error.state), error)
    print("is_same", weights(jstep.Saver(directory).restore(error.state)) == weights(error.state), flush=True)
    raise
print("weights", weights(state))  # waits for ever for a process that has left
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "when"),
    [("end", "which is saved; start the run again to resume"), ("close", "while it closed")],
    ids=["before the last look", "after it"],
)
def test_all_processes_leave_for_a_signal_that_one_receives_at_the_end(where: str, when: str, tmp_path: Path) -> None:
    ended = wait_for(start_all(LATE, 2, tmp_path, where))
    assert [one.code for one in ended] == [138, 138]
    for one in ended:
        assert printed(one.out.split("\n"), "raised") == f"5 SIGUSR1 stopped the run after step 5, {when}"
        assert printed(one.out.split("\n"), "is_same") == "True"
    assert jstep.Saver(tmp_path).all_steps() == [5]
