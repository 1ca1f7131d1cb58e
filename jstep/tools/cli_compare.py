"""`diff` of the command line: comparison of checkpoints, arrays and run cards."""

import argparse
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jstep.checkpoint.manifest import LeftOut
from jstep.core.tables import columns, printable
from jstep.hooks.start_differences import IN_A_AND_B, changes
from jstep.stores.files import is_directory, names_in
from jstep.stores.starts import Start, last_trained, read_starts
from jstep.stores.urls import is_url, join_path, location, split_path
from jstep.tools import cli
from jstep.tools.cli_inspect import Checkpoint, at, below
from jstep.tools.ranges import is_inexact
from jstep.tools.run_summary import start_with_card

# Comparison of two arrays, by absolute difference and by units in the last place.


class LeafDifference(NamedTuple):
    """The difference of a leaf; `why` is its kind, such as "dtype" or "only in A".

    `max_abs` is the largest difference of two finite numbers. `max_ulps`, in units in the last place, ignores NaNs and
    infinities of opposite signs.
    """

    path: str
    why: str
    detail: str
    number: int | None = None
    size: int | None = None
    max_abs: float | None = None
    max_ulps: int | None = None


def array_difference(path: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> LeafDifference | None:
    """Return the difference of two arrays of one dtype; None if they are bitwise identical."""
    if a.shape != b.shape:
        return LeafDifference(path, "shape", f"{list(a.shape)} in A, {list(b.shape)} in B")
    bits_a, bits_b = _bits(a), _bits(b)
    other = np.any(bits_a != bits_b, axis=1)
    number = int(other.sum())
    if not number:
        return None
    of_a, of_b = a.reshape(-1)[other], b.reshape(-1)[other]
    max_abs, ulps = _by_how_much(of_a, of_b)
    words = [f"{number} of {a.size} differ" if a.size > 1 else "differs"]
    words += [] if max_abs is None else [f"by up to {max_abs:.6g}" if a.size > 1 else f"by {max_abs:.6g}"]
    words += [] if ulps is None else [f"({ulps} ULP{'s' if ulps != 1 else ''})"]
    if is_inexact(a.dtype):
        opposite = _are_opposite(of_a, of_b)
        nans = int(np.isnan(of_a).sum() + np.isnan(of_b).sum())
        infinities = int(np.isinf(of_a[~opposite]).sum() + np.isinf(of_b[~opposite]).sum())
        flips = int(opposite.sum())
        more = [f"{nans} NaN"] * bool(nans) + [f"{infinities} infinite"] * bool(infinities)
        more += [f"{flips} infinite of opposite sign"] * bool(flips)
        words += [f"with {' and '.join(more)}"] if more else []
    return LeafDifference(path, "values", " ".join(words), number, int(a.size), max_abs, ulps)


def _are_opposite(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a mask of infinities of opposite signs."""
    return np.asarray(np.isinf(a) & np.isinf(b) & (a != b))


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.dtype.itemsize)


def _by_how_much(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float | None, int | None]:
    if np.iscomplexobj(a):
        return _by_how_much(a.view(a.real.dtype), b.view(b.real.dtype))
    if not is_inexact(a.dtype):
        if a.dtype == np.bool_:
            return None, None
        return float(_gap(a, b)), None
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(wide_a) & np.isfinite(wide_b)
    with np.errstate(over="ignore"):
        max_abs = float(np.abs(wide_a[finite] - wide_b[finite]).max()) if finite.any() else None
    numbers = ~(np.isnan(wide_a) | np.isnan(wide_b) | _are_opposite(wide_a, wide_b))
    ulps = _gap(_order(a[numbers]), _order(b[numbers])) if numbers.any() else None
    return (None if max_abs is None or not np.isfinite(max_abs) else max_abs), ulps


def _gap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    """The largest difference of integers, computed in uint64 because two int64 may overflow int64."""
    above, under = np.maximum(a, b), np.minimum(a, b)
    return int((above.astype(np.uint64) - under.astype(np.uint64)).max())


def _order(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Map floats to integers of the same order; 0.0 and −0.0 are equal."""
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.int64)
    magnitude = np.int64(2 ** (8 * x.dtype.itemsize - 1) - 1)  # all bits except the sign
    return np.where(bits & ~magnitude, -(bits & magnitude), bits)


# Reading and comparing the run cards that are stored next to checkpoints or logs.


def differences(places: Iterable[tuple[str, str | None]], problems: list[str]) -> list[str] | None:
    """Describe the differences between the cards of two runs, as they were trained; None if a card is missing.

    Why a card cannot be compared is appended to `problems`.
    """
    both: list[dict[str, Start]] = []
    for where, prefix in places:
        found: dict[str, Start] = {}
        with contextlib.suppress(OSError):  # a directory that cannot be read is reported by the comparison itself
            for name, starts in read_starts(where).items():
                problems += [
                    f"{where}: its start {one['number']} {one['problem']}" for one in starts if one.get("problem")
                ]
                valid = [start for start in starts if not start.get("problem")]
                if start := start_with_card(valid, (last_trained(valid) or {}).get("start")):
                    found[name] = start
        # Only the start of the prefix; all if the run has none for it, such as for the best checkpoints.
        both.append({prefix: found[prefix]} if prefix in found else found)
    of_a, of_b = both
    names = [(prefix, prefix) for prefix in sorted(of_a.keys() & of_b.keys())]
    if not names and len(of_a) == len(of_b) == 1:
        names = list(zip(of_a, of_b, strict=True))
    if not names:
        return None
    return [
        f"{one}: {line}" if len(names) > 1 else line
        for one, other in names
        for line in changes(of_a[one], of_b[other], IN_A_AND_B).lines
    ]


_SHOWN = 40


def changes_text(lines: list[str] | None) -> list[str]:
    if lines is None:
        return []
    if not lines:
        return ["the cards of the last starts do not differ"]
    return ["the cards of the last starts differ:", *_first(lines[:_SHOWN], len(lines) - _SHOWN)]


def _first(lines: Sequence[str], others: int) -> list[str]:
    more = [f"and {others} more (--json lists all)"] if others > 0 else []
    return [f"  {line}" for line in (*lines, *more)]


# `diff` of one run: the changes from each of its starts to the next one.


def read_changes(where: str) -> list[dict[str, Any]]:
    """Return the starts of the runs in a directory, each with the changes since the previous one of its prefix.

    The `changes` of a first start are None.
    """
    found: list[dict[str, Any]] = []
    for prefix, starts in read_starts(where).items():
        before: Start | None = None
        for start in starts:
            if start.get("problem"):
                lines, is_known = [f"its start {start['problem']}"], False
            elif start.get("card"):
                lines, is_known = None if before is None else changes(before, start).lines, True
                before = start
            else:
                continue
            time, step = start.get("opened"), (start.get("card") or {}).get("step") or 0
            found.append({"prefix": prefix, "time": time, "step": step, "known": is_known, "changes": lines})
    if not found:
        raise ValueError(f"{where}: no start of a run is there; give the checkpoint_dir of a run, or its logdir")
    return sorted(found, key=lambda start: start["time"] or 0.0)


def _text_of_starts(starts: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    several = len({start["prefix"] for start in starts}) > 1
    for start in starts:
        own = start["changes"]
        date = "" if start["time"] is None else f"{cli.local_text(start['time'], 'seconds')[0]}, "
        what = "nothing has changed" if own == [] else "changed since the start before:" if own else "the first start"
        what = what if start["known"] else "its card cannot be read:" if own else "a card of another version"
        lines.append(f"{start['prefix'] + ': ' if several else ''}{date}from step {start['step']}: {what}")
        lines += _first((own or [])[:_SHOWN], len(own or []) - _SHOWN)
    return lines


# `diff` of two runs: the first step at which they diverge; of two checkpoints: the leaves that differ.


def differences_left_out(a: Checkpoint, b: Checkpoint) -> Iterator[LeafDifference]:
    """Yield the differences of leaves that were left out of one or both checkpoints."""
    of_a, of_b = a.left_out, b.left_out
    records_a, records_b = of_a | _saved(a, set(of_b)), of_b | _saved(b, set(of_a))
    for path in of_a | of_b:
        first, second = records_a.get(path), records_b.get(path)
        where = f"left out of {'both' if path in of_a and path in of_b else 'A' if path in of_a else 'B'}"
        if first is None or second is None:
            only = "only in A" if second is None else "only in B"
            yield LeafDifference(path, only, f"{only}, {where}")
        elif (first.dtype, first.shape) != (second.dtype, second.shape):
            kinds = f"{first.dtype}{list(first.shape)} in A, {second.dtype}{list(second.shape)} in B"
            yield LeafDifference(path, "shape" if first.dtype == second.dtype else "dtype", f"{kinds}, {where}")
        elif first.fingerprint != second.fingerprint:
            yield LeafDifference(path, "values", f"the fingerprint, {where}")


def _saved(checkpoint: Checkpoint, paths: set[str]) -> dict[str, LeftOut]:
    """The records that saved leaves would have if they had been left out."""
    saved = paths & checkpoint.named.keys()
    if not saved:
        return {}
    from jstep.checkpoint.leaf_records import start_leaf_fingerprints  # imports JAX, which is not needed above

    return {name: start_leaf_fingerprints([(leaf, array)])()[0] for name, leaf, array in checkpoint.leaves(saved)}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a checkpoint, a directory of checkpoints, or a log of fingerprints (or a logdir that contains one)"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument(
        "b", metavar="B", nargs="?", help="the same for the other run; without it, A's starts are compared"
    )


class _Side(NamedTuple):
    """One side of the comparison; `steps` maps (step, prefix) to checkpoints or entries of a log."""

    path: str
    kind: str
    steps: Mapping[tuple[int, str], Any]
    problems: Sequence[str] = ()


def _run(arguments: argparse.Namespace) -> int:
    if arguments.b is None:
        # Each start of a run is compared with the one before. As for two runs, cards do not decide the exit code.
        run = location(arguments.a, "A")
        starts = read_changes(run)
        return cli.answer(arguments, {"run": run, "starts": starts}, map(printable, _text_of_starts(starts)))
    a, b = (_side(location(path, name)) for path, name in ((arguments.a, "A"), (arguments.b, "B")))
    if a.kind != b.kind:
        raise ValueError(f"{a.path} is {a.kind}, and {b.path} is {b.kind}: pass two of the same kind")
    # The directories in which the runs keep their cards, and the prefixes of single checkpoints.
    folders = [x.path if x.kind == "a directory of checkpoints" else split_path(x.path)[0] or "." for x in (a, b)]
    prefixes = [next(prefix for _, prefix in x.steps) if x.kind == "a checkpoint" else None for x in (a, b)]
    invalid: list[str] = []
    of_cards = differences(zip(folders, prefixes, strict=True), invalid)
    if not arguments.json:
        cli.show(map(printable, [*invalid, *changes_text(of_cards)]))
    if a.kind == "a checkpoint":
        (first,), (second,) = a.steps.values(), b.steps.values()
        every = {name for x in (first, second) for name in (*x.left_out, *x.named)}
        steps = {"a": first.step, "b": second.step}
        result = _result(a, b, _leaves(first, second), steps=steps, compared=len(every))
    else:
        result = _runs(a, b)
    code = cli.answer(
        arguments,
        result | ({} if of_cards is None else {"cards": of_cards}) | ({"invalid_cards": invalid} if invalid else {}),
        _text(result),
        cli.OK if result["same"] else cli.DIFFERENT,
    )
    return cli.complain("diff", *a.problems, *b.problems) or code


def _side(path: str) -> _Side:
    checkpoint = at(path)
    if checkpoint is not None:
        return _Side(path, "a checkpoint", {(checkpoint.step, checkpoint.prefix): checkpoint})
    in_directory = is_directory(path)
    if in_directory:
        checkpoints, problems = below(path)
        if checkpoints or problems:
            by_step = {(checkpoint.step, checkpoint.prefix): checkpoint for checkpoint in checkpoints}
            return _Side(path, "a directory of checkpoints", by_step, list(problems.values()))
    elif not is_url(path) and not os.path.lexists(path):
        raise FileNotFoundError(f"no such checkpoint, directory or log: {path}")
    elif not is_url(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is neither a directory nor a regular file")
    return _log_at(path, in_directory)


def _log_at(path: str, in_directory: bool) -> _Side:
    from jstep.state import fingerprints  # imports JAX, which is not needed above

    if in_directory:
        if fingerprints.FINGERPRINTS_FILE not in names_in(path):
            raise FileNotFoundError(f"no checkpoints and no {fingerprints.FINGERPRINTS_FILE} in {path}")
        path = join_path(path, fingerprints.FINGERPRINTS_FILE)
    log = fingerprints.read_log(path)
    problems = [f"{path}: {problem}; the other lines are compared" for problem in log.corrupted]
    if not log.entries:
        why = problems[0] if problems else f"{path} has no complete line"
        raise ValueError(
            f"{why}. A log of fingerprints, as written by jstep.FingerprintHook, has one JSON object per line"
        )
    return _Side(path, "a log of fingerprints", {(step, ""): entry for step, entry in log.entries.items()}, problems)


def _runs(a: _Side, b: _Side) -> dict[str, Any]:
    of_a, of_b = a.steps, b.steps
    prefixes = [{prefix for _, prefix in of} for of in (of_a, of_b)]
    if not prefixes[0] & prefixes[1] and len(prefixes[0]) == len(prefixes[1]) == 1:
        of_a, of_b = ({(step, ""): item for (step, _), item in of.items()} for of in (of_a, of_b))
    keys = sorted(of_a.keys() & of_b.keys())
    if not keys:
        some = []
        for of in (of_a, of_b):
            steps = sorted(step for step, _ in of)
            shown = ", ".join(map(str, steps[:4])) + (f", …, {steps[-1]}" if len(steps) > 4 else "")
            some.append(shown or "none")
        raise ValueError(f"no step in common: {a.path} has {some[0]}, and {b.path} has {some[1]}")
    common = [step for step, _ in keys]
    for before, key in enumerate(keys):
        if a.kind == "a log of fingerprints":
            differing = _of_entries(of_a[key], of_b[key])
        else:
            leaves = _leaves(of_a[key], of_b[key])
            differing = (leaves, {}) if leaves else None
        if differing is not None:
            return _result(
                a, b, differing[0], step=key[0], common=common, same_before=before, same=False, **differing[1]
            )
    return _result(a, b, [], common=common)


def _of_entries(a: Any, b: Any) -> tuple[list[LeafDifference], dict[str, bool]] | None:
    """Return the leaves that differ, and further fields of the result."""
    from jstep.state.fingerprints import compare_logs as log_difference

    result = log_difference(a, b)
    if result is None:
        return None
    if result.leaves is None:
        return [], {"leaves_known": False}
    only = dict.fromkeys(result.first_only, "only in A") | dict.fromkeys(result.second_only, "only in B")
    return [LeafDifference(path, only.get(path, "fingerprint"), only.get(path, "")) for path in result.leaves], {}


def _leaves(a: Checkpoint, b: Checkpoint) -> list[LeafDifference]:
    for checkpoint in (a, b):
        if problems := checkpoint.problems():
            raise ValueError(f"{checkpoint.path} is corrupted: {'; '.join(problems[:3])}")
    absent = a.left_out.keys() | b.left_out.keys()
    of_a, of_b = ({name: leaf for name, leaf in x.named.items() if name not in absent} for x in (a, b))
    by_name: dict[str, LeafDifference] = {}
    for name, leaf in of_a.items():
        other = of_b.get(name)
        if other is None:
            by_name[name] = LeafDifference(name, "only in A", "only in A")
        elif (leaf.dtype, leaf.key_impl) != (other.dtype, other.key_impl):
            by_name[name] = LeafDifference(name, "dtype", f"{leaf.dtype} in A, {other.dtype} in B")
    both = [name for name in of_a if name not in by_name]
    # Read leaf by leaf, because two checkpoints may not fit into memory.
    for (name, _, array), (_, _, its) in zip(a.leaves(both), b.leaves(both), strict=True):
        if (differing := array_difference(name, array, its)) is not None:
            by_name[name] = differing
    others = [LeafDifference(name, "only in B", "only in B") for name in of_b if name not in of_a]
    return [*(by_name[name] for name in of_a if name in by_name), *others, *differences_left_out(a, b)]


def _result(a: _Side, b: _Side, differing: list[LeafDifference], **more: object) -> dict[str, Any]:
    leaves = [{key: value for key, value in leaf._asdict().items() if value is not None} for leaf in differing]
    return {"a": a.path, "b": b.path, "kind": a.kind, "same": not differing, "leaves": leaves} | more


def _text(result: dict[str, Any]) -> list[str]:
    leaves, common = result["leaves"], result.get("common")
    if result["same"]:
        if common is None:
            return [f"identical ({result['compared']} leaves, bitwise)"]
        if len(common) == 1:
            return [f"identical at the only common step, {common[0]}"]
        return [f"identical at all {len(common)} common steps, {common[0]} to {common[-1]}"]
    if common is None:
        steps = result["steps"]
        at_steps = f"step {steps['a']}" if steps["a"] == steps["b"] else f"step {steps['a']} in A, {steps['b']} in B"
        lines = [f"{len(leaves)} of {result['compared']} leaves differ ({at_steps})"]
    else:
        lines = [f"the runs diverge at step {result['step']} ({_place_among(result['same_before'], len(common))})"]
        if result.get("leaves_known", True):
            lines.append(f"{len(leaves)} {'leaf differs' if len(leaves) == 1 else 'leaves differ'}")
        else:
            lines.append("which leaves differ is not known: a log was written with per_leaf=False")
    shown = [(leaf["path"], leaf["detail"]) for leaf in leaves[:_SHOWN]]
    return lines + _first(columns(shown, 2, cli.terminal_width() - 2), len(leaves) - _SHOWN)


def _place_among(before: int, common: int) -> str:
    if before:
        return f"identical at {before} earlier common step{'s' if before > 1 else ''}, of {common}"
    return "the only common step" if common == 1 else f"the first of {common} common steps"


DIFF = cli.Command(_add_arguments, _run)
