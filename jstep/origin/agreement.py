"""The comparison of the processes of a run, before anything is written.

Each process runs the program by itself. Without this check, a difference between them, such as
another `last_step`, would show up as a wait of half an hour, because they would not call the same
collectives.
"""

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jstep.checkpoint.saver import Saver
from jstep.checkpoint.shared_directory import check_shared
from jstep.core import processes, trees
from jstep.core.checks import array_type, format_list
from jstep.core.trees import Tree
from jstep.hooks.cadence import hook_cadence
from jstep.origin.arguments import Options
from jstep.state.train_state import TrainState

_LEAVES = "leaves of the state"
"""The fact that is compared by its hash, and explained by the leaves themselves."""
_MAX_LEAVES_NAMED = 8
"""The maximum number of leaves of a process that an error names."""


def check_processes(options: Options, state: TrainState, step: int | None) -> None:
    """Check that all processes were given the same run and see one `checkpoint_dir`.

    Args:
        step: The step of the state, if it is known.

    Raises:
        ValueError: They were not. The message names what differs, with the value of each process;
            all of them raise it.
    """
    if processes.is_single_process():
        return
    leaves = _leaves(state)
    facts = {
        **_facts(options),
        "step of the state": step,
        _LEAVES: zlib.crc32("\n".join(leaves).encode()),
    }
    rows = [json.loads(text) for text in processes.gather_texts(json.dumps(facts))]
    for name in facts:
        values = [row.get(name) for row in rows]
        if any(value != values[0] for value in values):
            raise ValueError(_difference(name, values, leaves))
    if options.checkpoint_dir is not None:
        saver = options.checkpoint_dir
        check_shared(saver.directory if isinstance(saver, Saver) else saver, "checkpoint_dir")


def _facts(options: Options) -> dict[str, Any]:
    """Return all that determines which collectives are called, and when.

    Values that may differ between processes are left out, such as the interval of a log, unless
    calls end where a line is due.
    """
    facts: dict[str, Any] = {
        "last_step": options.last_step,
        "steps_per_call": options.steps_per_call,
        "save_checkpoint_steps": options.save_checkpoint_steps,
        # For these, it matters only whether they are given: process 0 alone decides by seconds,
        # and paths may differ.
        "checkpoint_dir is given": options.checkpoint_dir is not None,
        "stop_secs is given": options.stop_secs is not None,
        "start_from is given": options.start_from is not None,
        "save_checkpoint_secs is given": options.save_checkpoint_secs is not None,
        "number of hooks": len(options.hooks),
    }
    ends_calls = options.steps_per_call != 1
    if ends_calls:
        # A call of several steps ends where a line is due.
        facts["log_steps"] = None if options.progress is False else options.log_steps
        facts["save_summaries_steps"] = (
            None if options.logdir is None else options.save_summaries_steps
        )
    for number, hook in enumerate(options.hooks):
        facts[f"cadence of hooks[{number}]"] = _cadence(hook, ends_calls=ends_calls)
    return facts


def _cadence(hook: object, *, ends_calls: bool) -> str | None:
    """Describe the cadence of a hook; None if it may differ, as for the log of one process."""
    cadence = hook_cadence(hook)
    if cadence is None:
        return None
    ends_calls_here = ends_calls and cadence.ends_calls
    if not cadence.together and not ends_calls_here:
        return None
    clock = " or by the clock" if cadence.secs is not None else ""
    return f"every {cadence.steps} steps{clock}"


def _leaves(state: Tree) -> list[str]:
    leaves: list[str] = []
    for path, leaf in trees.leaves_with_paths(state):
        if hasattr(leaf, "dtype"):
            kind = array_type(leaf.shape, str(leaf.dtype))
        else:
            kind = type(leaf).__name__
        leaves.append(f"{path} {kind}")
    return leaves


def _difference(name: str, values: list[Any], leaves: list[str]) -> str:
    if name == _LEAVES:
        return _differing_leaves(leaves)
    described = [f"{value} on process {process}" for process, value in enumerate(values)]
    return (
        f"{name}: must be the same on all processes, got {format_list(described, 8)}; start all of "
        "them with the same program and arguments"
    )


def _differing_leaves(leaves: list[str]) -> str:
    rows = [text.split("\n") for text in processes.gather_texts("\n".join(leaves))]
    for process, row in enumerate(rows):
        if row == rows[0]:
            continue
        # Counters, because a custom node of a tree may have one path twice.
        only_first = [*(Counter(rows[0]) - Counter(row)).elements()]
        only_other = [*(Counter(row) - Counter(rows[0])).elements()]
        kind = "leaves"
        if not only_first and not only_other:
            kind = "order of leaves"
            pairs = zip(rows[0], row, strict=True)
            first, other = next((first, other) for first, other in pairs if first != other)
            only_first = [first]
            only_other = [other]
        return (
            f"state: must have the same {kind} on all processes, got "
            f"{format_list(only_first, _MAX_LEAVES_NAMED) or 'fewer'} on process 0 and "
            f"{format_list(only_other, _MAX_LEAVES_NAMED) or 'fewer'} on process {process}; create "
            "it from the same program and arguments on all of them"
        )
    raise AssertionError("the leaves do not differ")


def check_latest(latest: int | None) -> None:
    """Check that all processes find the same newest checkpoint, from which they resume together."""
    if processes.is_single_process():
        return
    found = processes.ints_of_all(-1 if latest is None else latest)
    steps: Mapping[int, int] = {process: step for process, (step,) in enumerate(found)}
    if len({*steps.values()}) > 1:
        described = [
            f"{'none' if step < 0 else step} on process {process}"
            for process, step in steps.items()
        ]
        raise ValueError(
            "checkpoint_dir: must have the same newest checkpoint on all processes, got step "
            f"{format_list(described, 8)}; start the run again once its file system shows all "
            "of them the same files"
        )
