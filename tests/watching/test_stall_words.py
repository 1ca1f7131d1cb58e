"""What the watch for stalls says of each wait, of other processes, and in which order it ends a
process."""

import threading
import types
from typing import Any

import pytest

import jstep
from jstep.core import threads
from jstep.core.stopwatch import EVALUATING, SAVING, STEPPING, WAITING
from jstep.core.threads import AGREEING, AGREEING_ON_SHAPES, TRACING
from jstep.hooks.course import Activity, HookCall
from jstep.hooks.run_hook import RunHook, timing_key
from jstep.loop import stopping
from jstep.metering.in_flight import InFlight
from jstep.record.starts import StartFile
from jstep.watching import stall_watch as stalls
from jstep.watching.stall_watch import StallWatch, Wait


def run_of(*, loop: Any = None, dispatch: Any = None, **more: Any) -> Any:
    """A run at step 5 of one that began at step 2, in a call of the steps 5 and 6."""
    loop = loop or {}
    course = {
        "first": 2,
        "status": "between",
        "activity": Activity.CALLING,
        "restoring": None,
        "has_first": True,
    }
    step = loop.get("step", 5)
    components = types.SimpleNamespace(
        feeder=types.SimpleNamespace(steps=2, received_at=3),
        batches=types.SimpleNamespace(consumed=4), dispatch=dispatch or dispatch_of(),
    )  # fmt: skip
    fields = {
        "is_open": True, "components": components, "step": step,
        "is_over": loop.get("is_over", False), "saver": None, "shared": {},
        "options": types.SimpleNamespace(directory="runs", checkpoint_prefix="model"),
        "course": types.SimpleNamespace(**course | loop, has_trained=step > 2),
        "watch": types.SimpleNamespace(current=STEPPING, lasted={SAVING: [], WAITING: []}),
        "in_flight": InFlight(),
    }  # fmt: skip
    return types.SimpleNamespace(**fields | more)


def dispatch_of(*, unfinished: float = 0) -> Any:
    record = types.SimpleNamespace(unfinished=unfinished)
    return types.SimpleNamespace(compiler=types.SimpleNamespace(counts=record))


def watch_of(
    run: Any, *, warn: float = 2.0, process: int = 0, count: int = 3, **more: Any
) -> StallWatch:
    """A watch of a stand-in for a run, without a thread."""
    watch = object.__new__(StallWatch)
    files = types.SimpleNamespace(
        others=[], is_reported_elsewhere=False, shown=None, period=1.0, finish=lambda fields: None
    )
    fields = {
        "run": run, "_hook": jstep.StallHook(warn_secs=warn), "_index": process, "_count": count,
        "_name": "process 0 of 3", "_ident": 1,
        "_every": 1.0, "_wait": Wait("start", ""), "_files": files,
    }  # fmt: skip
    vars(watch).update(fields | more)
    return watch


def of_hook(name: str, phase: str | None = None) -> HookCall:
    hook = jstep.Hook() if phase is None else types.new_class(name, (RunHook,))()
    hook.name = name  # type: ignore[union-attr]
    if phase is not None:
        hook._phase = phase  # type: ignore[union-attr]
    return HookCall(hook, "after_step")


def doing(activity: Any, **more: Any) -> Any:
    return run_of(loop={"activity": activity, **more})


def waits() -> dict[str, Any]:
    """Each wait, by the run that is in it."""
    saving = types.SimpleNamespace(**vars(run_of().watch) | {"current": SAVING})
    return {
        "in a call of steps 5 to 6": run_of(),
        "in a call of steps 3 to 4": doing(Activity.CHECKING),
        "saving step 5": doing(of_hook("Saver", SAVING)),
        "saving step 5 #2": run_of(watch=saving, loop={"activity": of_hook("RunSaver", STEPPING)}),
        "in the hook Mine at step 5": doing(of_hook("Mine")),
        "in the body of the loop at step 5": doing(Activity.BODY),
        "in the code after the loop at step 5": doing(Activity.AFTER_LOOP),
        "in an evaluation at step 5": doing(of_hook("Loss", EVALUATING)),
        "closing after step 5": doing(Activity.ENDING),
        "closing after step 5 #2": run_of(watch=saving, loop={"activity": Activity.ENDING}),
        "restoring step 3": doing(Activity.RESTORING, first=3),
        "starting at step 5": doing(Activity.STARTING),
        "starting: it looks for checkpoints": doing(Activity.STARTING, has_first=False),
        "compiling step 5's program": doing(Activity.COMPILING),
        "waiting for batch 6": doing(Activity.FETCHING),
        "compiling step 5's program #2": run_of(dispatch=dispatch_of(unfinished=3)),
        "in a call of steps 5 to 6 #2": run_of(dispatch=dispatch_of(unfinished=2)),
    }


@pytest.mark.parametrize("what", waits())
def test_what_is_waited_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls.threads, "activities_of", lambda ident: ())
    assert watch_of(waits()[what])._current_wait().what == what.partition(" #")[0]


def test_tracing_is_compiling_unless_a_batch_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls.threads, "activities_of", lambda ident: (TRACING,))
    runs = waits()
    assert watch_of(runs["in a call of steps 5 to 6"])._current_wait().kind == "compile"
    assert watch_of(runs["waiting for batch 6"])._current_wait().kind == "batch"
    assert watch_of(runs["in the hook Mine at step 5"])._current_wait().kind == "hook"


@pytest.mark.parametrize(
    ("what", "topic"),
    [
        ("in a call of steps 5 to 6", "what is due at step 5"),
        ("starting at step 5", "what is due at step 5"),
        ("in the hook Mine at step 5", "the hook Mine at step 5"),
        ("saving step 5", "saving step 5"),
    ],
)
def test_what_processes_agree_on(what: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls.threads, "activities_of", lambda ident: (AGREEING,))
    wait = watch_of(waits()[what])._current_wait()
    assert (wait.kind, wait.timing_key, wait.what) == (
        *(stalls.AGREEMENT, stalls.AGREEMENT),
        f"waiting for other processes to agree on {topic}",
    )
    monkeypatch.setattr(
        stalls.threads, "activities_of", lambda ident: (AGREEING, AGREEING_ON_SHAPES)
    )
    assert (
        watch_of(waits()[what])._current_wait().what.endswith("agree on the new shapes of batch 5")
    )


def other(
    process: int, what: str = "waiting for batch 7", kind: str = "batch", **more: Any
) -> dict[str, Any]:
    return {"process": process, "host": f"h{process}", "what": what, "kind": kind, **more}


def test_the_others_are_named_or_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls.time, "monotonic", lambda: 10.0)
    agree = "waiting for other processes to agree on what is due at step 4"
    in_calls = [other(i, "in steps 1 to 4", stalls.CALL, steps=[1, 4]) for i in (1, 2)]
    agreeing = [other(i, agree, stalls.AGREEMENT) for i in (3, 4)]
    watch = watch_of(run_of(), count=7)
    files: Any = watch._files
    files.others = [*in_calls, *agreeing, other(5)]
    assert list(watch._elsewhere()) == [
        *(
            "2 others are in steps 1 to 4",
            f"2 others are {agree}",
            "process 5 (host h5) is waiting for batch 7",
        )
    ]
    files.is_reported_elsewhere = True  # by the process before this one
    assert list(watch._elsewhere()) == []
    files.is_reported_elsewhere = False
    files.others = [in_calls[0], agreeing[0]]  # one of each is named
    assert list(watch._elsewhere()) == [
        "process 1 (host h1) is in steps 1 to 4",
        f"process 3 (host h3) is {agree}",
    ]
    files.others = [other(i, f"waiting for batch {i}") for i in range(1, 11)]  # eight at most
    assert len(list(watch._elsewhere())) == 8
    same = [other(i, "in step 4", stalls.CALL, steps=[4, 4]) for i in (1, 2)]
    # Shown 2.5 periods ago, so that the others have had time to answer.
    files.others, files.shown = same, 7.5
    silent = "no sign of life from processes 3, 4, 5, 6"
    assert list(watch._elsewhere()) == ["2 others are in step 4", silent]
    files.others = [*same, *(other(i, f"saving step {i}") for i in (3, 4, 5))]
    assert list(watch._elsewhere())[-1] == "no sign of life from process 6"
    files.shown = 7.6
    assert "no sign" not in "".join(watch._elsewhere())
    watch.run.options.directory = None  # type: ignore[misc]
    files.shown = 7.5
    assert "no sign" not in "".join(watch._elsewhere())


class Gone(types.SimpleNamespace):
    """Files of a process whose own one is removed by the thread that writes it, right after it was
    asked for."""

    @property
    def shown(self) -> float | None:
        return self.times.pop(0) if self.times else None


def test_the_file_of_a_process_may_go_while_its_line_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stalls.time, "monotonic", lambda: 10.0)
    files = Gone(others=[other(1)], is_reported_elsewhere=False, period=1.0, times=[1.0])
    watch = watch_of(run_of(), _files=files)
    assert list(watch._elsewhere()) == [
        *("process 1 (host h1) is waiting for batch 7", "no sign of life from process 2")
    ]


def test_durations_are_those_of_saves_of_evaluations_and_of_each_method() -> None:
    hooks: list[Any] = [
        jstep.StallHook(),
        *(types.new_class("Own", (RunHook,))() for _ in range(2)),
    ]
    hooks[1]._phase, hooks[2]._phase = EVALUATING, SAVING
    keys = [timing_key(HookCall(hook, "after_step")) for hook in hooks]
    assert keys == [(id(hooks[0]), "after_step"), (id(hooks[1]), EVALUATING), SAVING]


def test_the_seconds_that_a_thing_usually_takes() -> None:
    run = run_of()
    run.watch.lasted[WAITING] = [1.0, 3.0, 2.0]
    run.watch.lasted |= {"thing": [1.0, 5.0], "other": []}
    watch = watch_of(run)
    assert watch._usual(Wait("hook", "", "thing")) == 5.0
    assert watch._usual(Wait("hook", "", "other")) is None
    assert watch._usual(Wait("batch", "")) == 2.0
    device = Wait(stalls.CALL, "", steps=(5, 6))
    assert watch._usual(device) is None
    run.in_flight.per_step.extend([0.5, 0.7, 0.6])
    assert watch._usual(device) == 0.6
    assert watch._usual(Wait("compile", "")) is None  # a program may take much longer than a step


def looked(
    says: list[str],
    *,
    looks: int = 14,
    shared: bool = False,
    **more: Any,
) -> list[Any]:
    """What a watch says, and what it exchanges, at looks a second apart while the loop waits for
    one batch."""
    watch = watch_of(run_of(), count=2 if shared else 1, **more)
    exchanged: list[Any] = []
    files: Any = watch._files
    files.exchange = lambda fields, read, immediately=False: exchanged.append(
        (fields and fields(), read, immediately)
    )
    stand_ins = {
        "_current_wait": lambda: Wait("batch", "waiting for batch 6", "key"),
        "_line": lambda wait: f"line at {wait.age:g}",
        "_exit": lambda wait: says.append(f"exit at {wait.age:g}"),
        "_fields": lambda wait, stall=True: (wait.age, stall),
        "_record": lambda wait: says.append(f"recorded after {wait.age:g}"),
    }
    for name, fn in stand_ins.items():
        setattr(watch, name, fn)
    for _ in range(looks):
        watch._check(1.0, 1.0)
    watch._end_wait()
    return exchanged


def test_a_process_that_waits_for_long_reads_whether_others_wait_for_it() -> None:
    watch, exchanged = (
        watch_of(run_of(), _current_wait=lambda: Wait("batch", "waiting for batch 6")),
        list[Any](),
    )
    files: Any = watch._files
    files.others = [other(1, stall=True)]
    files.exchange = lambda fields, read: exchanged.append((fields is not None, read))
    watch._usual = lambda wait: 100.0  # type: ignore[method-assign]
    for _ in range(4):
        watch._check(1.0, 1.0)
    watch._current_wait = lambda: Wait("batch", "waiting for batch 7")  # type: ignore[method-assign]
    watch._check(1.0, 1.0)
    assert exchanged == [(False, False)] * 3 + [(True, True), (False, False)]


def test_a_line_is_written_at_twice_the_age_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says: list[str] = []
    monkeypatch.setattr(stalls, "log_in_time", says.append)
    monkeypatch.setattr(StallWatch, "_is_stall", lambda self, wait: wait.age > 2)
    over = "process 0 of 3, which was waiting for batch 6, resumed after 13 s"
    quiet, due = [(None, False, False)] * 3, {3, 6, 12}

    def lines() -> list[str]:
        """What was said beside the record, which is written as long as it lasts, in case the
        process is killed."""
        assert says[-1].removeprefix("recorded after ") == says[-2].split()[-2]
        shown = [text for text in says if not text.startswith("recorded")]
        says.clear()
        return shown

    exchanged = looked(says)
    assert exchanged == quiet + [((age, True), age in due, age in due) for age in range(3, 14)]
    assert lines() == ["line at 3", "line at 6", "line at 12", over]
    looked(says, shared=True)  # with others, the line waits for their files
    assert lines() == ["line at 6", over]
    looked(says, looks=6, _hook=jstep.StallHook(warn_secs=1.0, exit_secs=3.5))
    assert lines() == ["line at 3", "exit at 4", "exit at 5", over.replace("13", "5")]


class LeftError(Exception):
    """In place of the end of the process."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said and done while a process is ended, in order."""
    found: list[str] = []

    def leave(code: int) -> None:
        found.append(f"exit {code}")
        raise LeftError

    for module in (stalls, stopping):
        monkeypatch.setattr(module, "log_in_time", found.append)
    monkeypatch.setattr(threads, "done_in_time", lambda fn, seconds, name: bool(fn() or seconds))
    monkeypatch.setattr(stopping, "done_in_time", lambda fn, seconds, name: bool(fn() or seconds))
    monkeypatch.setattr(
        stalls.faulthandler,
        "dump_traceback",
        lambda file, all_threads: found.append(f"dump {file} {all_threads}"),
    )
    monkeypatch.setattr(
        stopping, "print", lambda end, flush: found.append(f"flush {flush}"), raising=False
    )
    monkeypatch.setattr(stopping.logging, "shutdown", lambda: found.append("shutdown"))
    monkeypatch.setattr(stopping.os, "_exit", leave)
    monkeypatch.setattr(stopping.time, "sleep", lambda secs: found.append(f"sleep {secs}"))
    monkeypatch.setattr(stopping, "save_stalled_run", lambda run: f"step {run.step} is saved")
    monkeypatch.setattr(stopping.logger, "warning", lambda form, text: found.append(form % text))
    return found


class Recorded:
    """The file of a start, in which each stall is said."""

    def __init__(self, said: list[str]) -> None:
        self.said, self.fields, self.due = said, dict[str, Any](stalls=[]), threading.Event()

    def update(self, fields: dict[str, Any]) -> None:
        (stall,) = fields["stalls"]
        self.said.append(f"stall {stall['part']} {stall['stalled']}")


def ended(watch: StallWatch, wait: Wait, said: list[str]) -> list[str]:
    written: list[Any] = []
    files: Any = watch._files
    files.finish = lambda fields: written.append(fields())
    watch.run.shared[StartFile] = Recorded(said)
    with pytest.raises(LeftError):
        watch._exit(wait)
    assert (written[0]["exit_code"], written[0]["stall"], written[0]["what"]) == (
        75,
        True,
        wait.what,
    )
    return said


def test_a_process_ends_after_it_has_said_why_and_saved(said: list[str]) -> None:
    run = run_of(saver=object())
    wait = Wait("batch", "waiting for batch 6", age=61.2345)
    assert ended(watch_of(run, count=1), wait, said) == [
        "process 0 of 3 has been waiting for batch 6 for 61 s: it ends with exit code 75",
        *("dump 2 True", f"stall {STEPPING} 61.234", "step 5 is saved", "flush True", "shutdown"),
        *("sleep 0.0", "exit 75"),
    ]


@pytest.mark.parametrize(
    ("kind", "more", "is_saved"),
    [
        ("hook", {}, False),
        ("built-in hook", {}, False),
        ("compile", {}, False),
        ("batch", {"saver": None}, False),
        ("batch", {"loop": {"step": 2}}, False),
        ("batch", {"loop": {"step": 3}}, True),
    ],
)
def test_only_what_hangs_in_a_loader_is_saved(
    kind: str, more: Any, is_saved: bool, said: list[str]
) -> None:
    run = run_of(**{"saver": object(), **more})
    done = ended(watch_of(run, count=1), Wait(kind, "hanging", age=61.0), said)
    assert any("is saved" in line for line in done) is is_saved


@pytest.mark.parametrize(("saves", "limit"), [([], 20.0), ([0.5], 2.0), ([0.5, 1.5, 0.1], 4.5)])
def test_a_save_may_last_as_long_as_those_before(
    saves: list[float], limit: float, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(
        stopping, "done_in_time", lambda fn, secs, name: limits.append(secs) or bool(fn() or secs)
    )
    run = run_of(saver=object())
    run.watch.lasted[SAVING] = saves
    ended(watch_of(run, count=1), Wait("batch", "waiting for batch 6", age=61.0), said)
    assert [each for each in limits if each != 5.0] == [limit]


@pytest.mark.parametrize(
    ("process", "warn", "secs"), [(0, 2.0, 4.0), (1, 2.0, 2.0), (1, 0.5, 1.5), (0, 60.0, 10.0)]
)
def test_several_processes_save_nothing_and_leave_process_0_last(
    process: int, warn: float, secs: float, said: list[str]
) -> None:
    watch = watch_of(run_of(saver=object()), process=process, warn=warn)
    assert ended(watch, Wait("batch", "hanging", age=61.0), said)[-3:] == [
        "shutdown",
        f"sleep {secs}",
        "exit 75",
    ]
