"""`benchmarks/check.py`: what it concludes from ratios and from how busy the machine was; no
benchmark runs."""

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
PAIR, OTHER = ("train", "bare loop"), ("mean", "train")


@pytest.fixture
def check(monkeypatch):
    """The module; it imports others of its folder."""
    monkeypatch.syspath_prepend(HERE)
    found = importlib.import_module("check")
    yield found
    for name in ("check", "bounds", "report"):
        sys.modules.pop(name)


def stat(*ticks):
    return f"cpu  {' '.join(map(str, ticks))} 0 0\ncpu0 1 2 3\n"


def test_what_other_processes_used_is_what_this_one_did_not(check):
    # user nice system idle iowait irq softirq steal, 100 ticks a second
    before = check.sample_of(stat(1000, 0, 0, 5000, 10, 0, 0, 50), 100, own=2.0, at=100.0)
    after = check.sample_of(stat(1800, 100, 60, 6000, 20, 20, 20, 90), 100, own=7.0, at=110.0)
    load = check.load_between(before, after, cores=2)
    # 10 s of work, 5 of it ours, in 10 s; 0.4 s of 20 are stolen.
    assert load == pytest.approx((0.5, 0.02))
    assert str(load) == "other processes used 0.50 cores, steal 2.0%"


@pytest.mark.parametrize(
    ("others", "steal", "is_idle"),
    [(0.0, 0.0, True), (0.1, 0.01, True), (0.5, 0.0, False), (0.0, 0.1, False)],
)
def test_a_machine_is_idle_if_neither_others_nor_the_hypervisor_take_time(
    check, others, steal, is_idle
):
    assert check.Load(others, steal).is_idle == is_idle


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([(1.05, "idle")], "ok"),
        ([(1.15, "idle")], "OVER"),
        ([(1.15, "idle"), (1.10, "idle")], "ok"),
        ([(1.15, "idle"), (1.05, "busy")], "OVER"),  # the quiet one counts
        ([(1.50, "busy"), (1.15, "idle")], "OVER"),
        ([(1.50, "busy"), (1.09, "idle")], "ok"),
        ([(1.50, "busy")] * 3, "not judged: the machine was busy"),
        ([(1.50, "busy"), (1.02, "busy")], "ok"),
        ([(None, "idle")], "not measured"),
        ([], "not measured"),
    ],
)
def test_the_verdict_on_a_ratio(check, runs, verdict):
    loads = {"idle": check.Load(0.0, 0.0), "busy": check.Load(1.0, 0.0)}
    attempts = [
        check.Attempt({} if ratio is None else {PAIR: ratio}, loads[load]) for ratio, load in runs
    ]
    assert check.judged(PAIR, 1.10, attempts) == verdict
    assert check.is_settled({PAIR: 1.10}, attempts) == (verdict == "ok")
    assert not check.is_settled({PAIR: 1.10, OTHER: 1.0}, attempts)


@pytest.mark.parametrize(
    ("ratio", "others", "verdict"),
    [
        (1.10, 0.0, "ok"),
        (1.11, 0.0, "above the bound, as known"),
        (1.30, 0.0, "above the bound, as known"),
        (1.31, 0.0, "OVER"),
        (1.31, 1.0, "not judged: the machine was busy"),
        (1.30, 1.0, "above the bound, as known"),
    ],
)
def test_the_verdict_on_a_bound_that_is_not_reached(check, ratio, others, verdict):
    attempts = [check.Attempt({PAIR: ratio}, check.Load(others, 0.0))]
    assert check.judged(PAIR, 1.10, attempts, 1.30) == verdict
    assert check.is_settled({PAIR: 1.10}, attempts, {PAIR: 1.30}) == (ratio <= 1.30)
    assert not check.is_settled({PAIR: 1.10, OTHER: 1.0}, attempts, {PAIR: 1.30})


def test_each_limit_is_above_its_bound_and_has_a_reason(check):
    reasons = importlib.import_module("bounds").REASONS
    for name, limits in check.LIMITS.items():
        for pair, limit in limits.items():
            assert limit > check.BOUNDS[name][pair]
            assert reasons[name][pair]


@pytest.mark.parametrize(
    ("ratios", "others", "code", "runs", "words"),
    [
        ([1.05], 0.0, 0, 1, "1.050 (bound 1.1): ok"),
        ([1.5, 1.05], 0.0, 0, 2, "1.500, 1.050 (bound 1.1): ok"),
        ([1.5, 1.4, 1.3], 0.0, 1, 3, "1.500, 1.400, 1.300 (bound 1.1): OVER"),
        ([1.5, 1.4, 1.3], 2.0, 0, 3, "not judged: the machine was busy"),
        ([None, None, None], 0.0, 1, 3, "- (bound 1.1): not measured"),
    ],
)
def test_the_exit_code(check, monkeypatch, capsys, ratios, others, code, runs, words):
    outputs = iter(ratios)
    ran = []

    def run(name, quick, limit):
        ran.append(name)
        ratio = next(outputs)
        line = "" if ratio is None else f"  train / bare loop: {ratio:.3f}  (bound 1.1)\n"
        return f"A title\n{line}", None

    monkeypatch.setattr(check, "BOUNDS", {"loop": {PAIR: 1.1}, "feed": {}})
    monkeypatch.setattr(check, "LIMITS", {})
    monkeypatch.setattr(check, "run", run)
    monkeypatch.setattr(check, "_wait_until_idle", lambda limit: check.Load(others, 0.0))
    monkeypatch.setattr(check, "load_between", lambda before, after, cores: check.Load(others, 0.0))
    assert check.main(["--only", "loop"]) == code
    assert ran == ["loop"] * runs
    printed = capsys.readouterr().out
    assert words in printed
    assert f"other processes used {others:.2f} cores" in printed


def test_each_bound_is_of_a_benchmark_that_prints_it(check):
    for name, bounds in check.BOUNDS.items():
        source = (HERE / f"bench_{name}.py").read_text()
        assert f'BOUNDS["{name}"]' in source
        assert bounds
