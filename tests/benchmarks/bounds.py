"""The largest ratios that benchmarks of the loop may show, which `check.py` enforces every night.

Benchmark → (program, compared with) → bound. The benchmarks print these bounds with their ratios.
"""

BOUNDS: dict[str, dict[tuple[str, str], float]] = {
    "loop": {
        ("train, four hooks", "bare loop"): 1.20,
        ("train, four hooks", "train, not watched"): 1.01,
        ("train, MetricsHook, mean", "train, MetricsHook"): 1.03,
        ("train, steps_per_call=100", "bare loop"): 0.55,
        ("train, steps_per_call=auto", "bare loop"): 0.60,
    },
    "feed": {
        ("train, generator", "bare loop, generator"): 1.10,
        ("train, function", "bare loop, function"): 1.10,
        ("train, jstep.batches", "bare loop, jstep.batches"): 1.10,
        ("train, generator, busy", "bare loop, generator, busy"): 1.25,
        ("train, function, busy", "bare loop, function, busy"): 1.25,
        ("train, jstep.batches, busy", "bare loop, jstep.batches, busy"): 1.25,
        ("train, loader of 10 ms", "bare loop, loader of 10 ms"): 0.60,
    },
    "positions": {
        ("with checkpoint_dir, buffer of 1 MB", "without, buffer of 1 MB"): 1.10,
        ("with checkpoint_dir, buffer of 100 MB", "without, buffer of 100 MB"): 1.10,
        ("with checkpoint_dir, list of 10⁴", "without, list of 10⁴"): 1.10,
        ("with checkpoint_dir, list of 10⁵", "without, list of 10⁵"): 1.10,
        ("with checkpoint_dir, array of 8 MB", "without, array of 8 MB"): 1.10,
    },
    "in_flight": {
        (f"{milliseconds} ms, with the bound", f"{milliseconds} ms, without it"): bound
        for milliseconds, bound in ((0.1, 1.05), (1, 1.02), (10, 1.02), (1000, 1.02))
    },
}
