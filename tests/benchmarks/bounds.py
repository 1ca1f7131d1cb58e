"""The largest ratios that benchmarks of the loop may show, which `check.py` enforces every night, and the reasons.

Benchmark → (program, compared with) → bound. The benchmarks print these bounds with their ratios. Each is like for
like: one step a call beside one, several beside as many, a thread that reads ahead beside another.
"""

BOUNDS: dict[str, dict[tuple[str, str], float]] = {
    "step": {
        ("jstep, 2 layers", "Flax + Optax, donated"): 1.10,
        ("jstep, 2 layers", "a tuple of arrays"): 1.45,
        ("jstep, 8 layers", "Flax + Optax, donated"): 1.05,
        ("jstep, 8 layers", "a tuple of arrays"): 1.10,
        ("jstep, transformer", "Flax + Optax, donated"): 1.03,
        ("jstep, transformer", "a tuple of arrays"): 1.05,
        ("jstep, 2 layers, 100 steps", "Flax + Optax, donated"): 1.03,
        ("jstep, 2 layers, 100 steps", "a tuple of arrays"): 1.05,
        ("jstep, 8 layers, 25 steps", "Flax + Optax, donated"): 1.03,
        ("jstep, 8 layers, 25 steps", "a tuple of arrays"): 1.05,
        ("jstep, transformer, 8 steps", "Flax + Optax, donated"): 1.03,
        ("jstep, transformer, 8 steps", "a tuple of arrays"): 1.05,
    },
    "loop": {
        ("train, four hooks", "bare loop"): 1.20,
        ("train, four hooks", "train, not watched"): 1.01,
        ("train, MetricsHook, mean", "train, MetricsHook"): 1.03,
        ("train, steps_per_call=100", "bare loop, 100 a call"): 1.20,
        ("train, steps_per_call=auto", "bare loop, 100 a call"): 1.60,
        ("train, 8 layers", "bare loop, 8 layers"): 1.05,
        ("train, transformer", "bare loop, transformer"): 1.03,
    },
    "feed": {
        ("train, generator", "bare loop, generator"): 1.10,
        ("train, function", "bare loop, function"): 1.10,
        ("train, jstep.batches", "bare loop, jstep.batches"): 1.10,
        ("train, generator, busy", "bare loop, generator, busy"): 1.25,
        ("train, function, busy", "bare loop, function, busy"): 1.25,
        ("train, jstep.batches, busy", "bare loop, jstep.batches, busy"): 1.25,
        ("train, loader of 10 ms", "a thread by hand, loader of 10 ms"): 1.05,
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

_CALL_BY_HAND = (
    "the same program; by hand, a call checks the batch and the state, and JAX walks through the names of the state, "
    "which takes microseconds; `train` hands the leaves to the program, without either"
)
_SAME_PROGRAM = "the same programs: what differs is the machine"
_NO_PERMUTATION = "`batches[N]` also computes the permutation, and its batches are new arrays"

REASONS: dict[str, dict[tuple[str, str], str]] = {
    "step": {
        ("jstep, 2 layers", "a tuple of arrays"): _CALL_BY_HAND,
        ("jstep, 8 layers", "a tuple of arrays"): _CALL_BY_HAND,
        ("jstep, 2 layers", "Flax + Optax, not donated"): "XLA's CPU backend copies what is donated and read late",
    },
    "loop": {
        ("train, four hooks", "bare loop"): (
            "the loop does the same around each call, however short the step is; steps_per_call divides it"
        ),
        ("train, four hooks", "train, not watched"): _SAME_PROGRAM,
        ("train, MetricsHook, mean", "train, MetricsHook"): (
            "the metrics of 25 steps are added by one program, whose call with 50 arguments takes 85 µs"
        ),
        ("train, steps_per_call=auto", "bare loop, 100 a call"): (
            "it times single calls, each to its end, and so chooses 16 steps a call where 64 would be quicker"
        ),
    },
    "feed": {
        (f"train, {name}", f"bare loop, {name}"): (
            "each batch is copied, since whoever makes it may use its buffers again, 12 µs of a step of 140 µs; and "
            "XLA's threads fall asleep in a pause between two steps. It varies by 0.05 from run to run"
        )
        for name in ("generator", "function", "jstep.batches")
    },
    "prefetch": {
        ("prefetch_to_device", "the slower of the two"): (
            "both share two cores, and Python work the interpreter: a thread by hand takes 1.09 to 1.52"
        ),
        ("prefetch_to_device", "a thread by hand"): "for its errors, positions and end",
    },
    "data": {
        ("batches[N]", "fancy indexing"): "with 784 bytes a row, copying the rows takes most of the time",
        ("batches[N]", "np.take"): _NO_PERMUTATION,
    },
    "optimizers": {("jstep", "Optax"): _SAME_PROGRAM},
    "fingerprint": {
        ("fingerprint, in host memory", "XLA's uint32 sum"): (
            "NumPy passes over the words several times: arrays of the host and of devices have one implementation, as "
            "their fingerprints must be equal bitwise"
        ),
    },
    "checkpoint": {
        ("Saver", peer): "the median of Orbax's manager varies by a factor of three here"
        for peer in ("orbax manager", "orbax manager, zarr3")
    },
    "whole_runs": {
        ("jstep", f"the quickest on PyTorch, {toolkit}"): (
            "PyTorch's matrix products (oneDNN) take 0.6 of the time of XLA's (Eigen) on this processor"
        )
        for toolkit in ("Hugging Face Trainer", "Lightning")
    },
}
"""Benchmark → (program, compared with) → why its ratio can be above its bound, or above 1 without a bound.

`report.py` writes the reason into the row of such a ratio.
"""
