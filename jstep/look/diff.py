"""`diff` of the command line: comparison of checkpoints, arrays and starts of runs."""

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jstep.core.checks import format_list
from jstep.core.tables import columns, fold
from jstep.look import cli
from jstep.look.checkpoints import Checkpoint, at, below
from jstep.look.divergence import divergence
from jstep.look.positions import position_differences
from jstep.look.ranges import is_inexact, norm
from jstep.look.run_folder import RunFolder, find_run_folders, run_folders
from jstep.look.starts import NOT_COMPARED, SHOWN, first_lines, lines_of_changes, state_change_lines
from jstep.record.differences import IN_A_AND_B, changes
from jstep.stores.files import is_directory, names_in
from jstep.stores.urls import is_url, join_path, location, split_path

# Comparison of two arrays, by absolute difference and by units in the last place.


class LeafDifference(NamedTuple):
    """The difference of a leaf; `why` is its kind, such as "dtype" or "only in A".

    `max_abs` and `max_ulps` are the largest differences of two finite numbers; `norms` are those of both arrays.
    """

    path: str
    why: str
    detail: str
    number: int | None = None
    size: int | None = None
    max_abs: float | None = None
    max_ulps: int | None = None
    norms: tuple[float, float] | None = None


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
    if is_inexact(a.dtype) and (bad := int(np.sum(~(np.isfinite(of_a) & np.isfinite(of_b))))):
        words.append(f"with {bad} not finite")
    norms = (norm(a), norm(b)) if a.size > 1 and is_inexact(a.dtype) else None
    if norms is not None:
        words[-1] += f", norm {norms[0]:.6g} in A, {norms[1]:.6g} in B"
    return LeafDifference(path, "values", " ".join(words), number, int(a.size), max_abs, ulps, norms)


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.dtype.itemsize)


def _by_how_much(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float | None, int | None]:
    if np.iscomplexobj(a):
        return _by_how_much(a.view(a.real.dtype), b.view(b.real.dtype))
    if not is_inexact(a.dtype):
        if a.dtype == np.bool_:
            return None, None
        return float(_gap(a, b)), None
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return None, None
    with np.errstate(over="ignore"):
        max_abs = float(np.abs(a[finite].astype(np.float64) - b[finite].astype(np.float64)).max())
    return (max_abs if np.isfinite(max_abs) else None), _gap(_order(a[finite]), _order(b[finite]))


def _gap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    """The largest difference of integers, computed in uint64 because two int64 may overflow int64."""
    above, under = np.maximum(a, b), np.minimum(a, b)
    return int((above.astype(np.uint64) - under.astype(np.uint64)).max())


def _order(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Map floats to integers of the same order; 0.0 and −0.0 are equal."""
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.int64)
    magnitude = np.int64(2 ** (8 * x.dtype.itemsize - 1) - 1)  # all bits except the sign
    return np.where(bits & ~magnitude, -(bits & magnitude), bits)


# Comparison of the starts of runs, as the next start of a run does it.


class _Recorded(NamedTuple):
    """The runs that a directory has recorded, and the prefix of the one that is compared, or None for all."""

    prefix: str | None
    folders: list[RunFolder]

    @classmethod
    def at(cls, where: str, prefix: str | None) -> "_Recorded":
        with contextlib.suppress(OSError):  # a directory that cannot be read is reported by the comparison itself
            return cls(prefix, run_folders(where))
        return cls(prefix, [])

    def trained(self) -> dict[str, Mapping[str, Any]]:
        found = {folder.prefix: folder.trained_with_card for folder in self.folders if folder.trained_with_card}
        # Only the run of the prefix; all if there is none with it, such as for the best checkpoints.
        return {self.prefix: found[self.prefix]} if self.prefix in found else found

    def state_changes(self) -> list[str]:
        folders = [folder for folder in self.folders if self.prefix in (None, folder.prefix)]
        return [line for folder in folders for start in folder.valid_starts for line in state_change_lines(start)]


def _start_differences(a: _Recorded, b: _Recorded) -> list[str] | None:
    """Describe the differences between two runs, as they were trained; None if there is no record of one."""
    of_a, of_b = a.trained(), b.trained()
    pairs = [(f"{prefix}: ", of_a[prefix], of_b[prefix]) for prefix in sorted(of_a.keys() & of_b.keys())]
    if not pairs and len(of_a) == len(of_b) == 1:
        pairs = [("", next(iter(of_a.values())), next(iter(of_b.values())))]
    if len(pairs) == 1:
        pairs = [("", *pairs[0][1:])]
    found = [f"{name}{line}" for name, x, y in pairs for line in changes(x, y, IN_A_AND_B).lines]
    return found if pairs else None


def changes_text(lines: list[str] | None) -> list[str]:
    if not lines:
        return [] if lines is None else ["the last starts do not differ", NOT_COMPARED]
    return ["the last starts differ:", *first_lines(lines)]


# `diff` of two runs: the first step at which they diverge; of two checkpoints: the leaves that differ.


def differences_left_out(a: Checkpoint, b: Checkpoint) -> Iterator[LeafDifference]:
    of_a, of_b = a.left_out, b.left_out
    for path in of_a | of_b:
        first = of_a.get(path)
        second = of_b.get(path)
        where = "left out of both"
        if first is None or second is None:
            yield LeafDifference(path, "left out", f"left out of {'A' if second is None else 'B'} only")
        elif (first.dtype, first.shape) != (second.dtype, second.shape):
            kinds = f"{first.dtype}{list(first.shape)} in A, {second.dtype}{list(second.shape)} in B"
            yield LeafDifference(path, "shape" if first.dtype == second.dtype else "dtype", f"{kinds}, {where}")
        elif first.fingerprint != second.fingerprint:
            yield LeafDifference(path, "values", f"the fingerprint, {where}")


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

    @property
    def folder(self) -> str:
        return self.path if self.kind == _DIRECTORY else split_path(self.path)[0] or "."

    @property
    def prefix(self) -> str | None:
        return next(prefix for _, prefix in self.steps) if self.kind == _CHECKPOINT else None


_CHECKPOINT, _DIRECTORY, _LOG = "a checkpoint", "a directory of checkpoints", "a log of fingerprints"


def _print_differences(arguments: argparse.Namespace) -> int:
    if arguments.b is None:
        # As for two runs, the starts do not decide the exit code.
        run = location(arguments.a, "A")
        starts = [start for folder in find_run_folders(run) for start in folder.facts_with_changes]
        return cli.answer(arguments, {"run": run, "starts": starts}, lines_of_changes(starts))
    a, b = (_side(location(path, name)) for path, name in ((arguments.a, "A"), (arguments.b, "B")))
    if a.kind != b.kind:
        raise ValueError(f"{a.path} is {a.kind}, and {b.path} is {b.kind}: pass two of the same kind")
    places = [(x.folder, x.prefix) for x in (a, b)]
    recorded = [_Recorded.at(where, prefix) for where, prefix in places]
    folders = [folder for x in recorded for folder in x.folders]
    problems = [f"{folder.path}: {problem}" for folder in folders for problem in folder.unreadable_starts]
    of_starts, of_states = _start_differences(*recorded), [x.state_changes() for x in recorded]
    if a.kind == _CHECKPOINT:
        (first,), (second,) = a.steps.values(), b.steps.values()
        every = {name for x in (first, second) for name in (*x.left_out, *x.named)}
        steps = {"a": first.step, "b": second.step}
        result = _result(a, b, _leaves(first, second), steps=steps, compared=len(every))
        if positions := _positions(first, second):
            result["positions"] = positions
    else:
        result = _runs(a, b)
    of_both = {*of_states[0]}.intersection(of_states[1])
    named = [(x, line) for x, lines in zip("AB", of_states, strict=True) for line in lines]
    changed = [f"in {x}, the state was {line}" for x, line in named if line not in of_both]
    lines = [*problems, *changes_text(of_starts), *first_lines(changed, indent=""), *_differences_text(result)]
    if a.kind != _CHECKPOINT:
        first = result.get("step")
        same = {step: step != first for step in result["common"] if first is None or step <= first}
        found = divergence(places, "checkpoints" if a.kind == _DIRECTORY else "fingerprints", same)
        result |= found._asdict()
        lines += filter(None, [found.text(places)])
    result |= ({} if of_starts is None else {"starts": of_starts}) | ({"unreadable": problems} if problems else {})
    result |= {"state_changes": changed} if changed else {}
    is_same = result["same"] and not result.get("positions")
    code = cli.answer(arguments, result, lines, cli.OK if is_same else cli.DIFFERENT)
    return cli.complain("diff", *a.problems, *b.problems) or code


def _side(path: str) -> _Side:
    checkpoint = at(path)
    if checkpoint is not None:
        return _Side(path, _CHECKPOINT, {(checkpoint.step, checkpoint.prefix): checkpoint})
    in_directory = is_directory(path)
    if in_directory:
        checkpoints, problems = below(path)
        if checkpoints or problems:
            by_step = {(checkpoint.step, checkpoint.prefix): checkpoint for checkpoint in checkpoints}
            return _Side(path, _DIRECTORY, by_step, list(problems.values()))
    elif not is_url(path) and not os.path.lexists(path):
        raise FileNotFoundError(f"no such checkpoint, directory or log: {path}")
    return _log_at(path, in_directory)


def _log_at(path: str, in_directory: bool) -> _Side:
    from jstep.hooks.fingerprints import FINGERPRINTS_FILE, read_log  # imports JAX, which is not needed above

    if in_directory:
        if FINGERPRINTS_FILE not in names_in(path):
            raise FileNotFoundError(f"no checkpoints and no {FINGERPRINTS_FILE} in {path}")
        path = join_path(path, FINGERPRINTS_FILE)
    log = read_log(path)
    problems = [f"{path}: {problem}; the other lines are compared" for problem in log.corrupted]
    if not log.entries:
        raise ValueError(problems[0] if problems else f"{path} has no complete line of a FingerprintHook")
    return _Side(path, _LOG, {(step, ""): entry for step, entry in log.entries.items()}, problems)


def _runs(a: _Side, b: _Side) -> dict[str, Any]:
    of_a, of_b = a.steps, b.steps
    prefixes = [{prefix for _, prefix in items} for items in (of_a, of_b)]
    if not prefixes[0] & prefixes[1] and len(prefixes[0]) == len(prefixes[1]) == 1:
        of_a, of_b = ({(step, ""): item for (step, _), item in items.items()} for items in (of_a, of_b))
    keys = sorted(of_a.keys() & of_b.keys())
    if not keys:
        some = [format_list([str(step) for step, _ in sorted(items)], 5) or "none" for items in (of_a, of_b)]
        raise ValueError(f"no step in common: {a.path} has {some[0]}, and {b.path} has {some[1]}")
    common = [step for step, _ in keys]
    positions = dict[str, Any]()
    for before, key in enumerate(keys):
        if a.kind == _LOG:
            differing = _of_entries(of_a[key], of_b[key])
        else:
            leaves = _leaves(of_a[key], of_b[key])
            differing = (leaves, {}) if leaves else None
            if not positions and (found := _positions(of_a[key], of_b[key])):
                positions = {"positions": found, "positions_step": key[0]}
        if differing is not None:
            at_step = {"step": key[0], "common": common, "same_before": before, "same": False}
            return _result(a, b, differing[0], **at_step, **differing[1], **positions)
    return _result(a, b, [], common=common, **positions)


def _positions(a: Checkpoint, b: Checkpoint) -> list[dict[str, str]]:
    found = position_differences(a.positions(), b.positions())
    return [{"name": name, "detail": detail} for name, detail in found]


def _of_entries(a: Any, b: Any) -> tuple[list[LeafDifference], dict[str, bool]] | None:
    from jstep.hooks.fingerprints import compare_logs

    result = compare_logs(a, b)
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
    for (name, _, array_a), (_, _, array_b) in zip(a.leaves(both), b.leaves(both), strict=True):
        if (differing := array_difference(name, array_a, array_b)) is not None:
            by_name[name] = differing
    others = [LeafDifference(name, "only in B", "only in B") for name in of_b if name not in of_a]
    return [*(by_name[name] for name in of_a if name in by_name), *others, *differences_left_out(a, b)]


def _result(a: _Side, b: _Side, differing: list[LeafDifference], **fields: object) -> dict[str, Any]:
    leaves = [{key: value for key, value in leaf._asdict().items() if value is not None} for leaf in differing]
    return {"a": a.path, "b": b.path, "kind": a.kind, "same": not differing, "leaves": leaves} | fields


def _differences_text(result: dict[str, Any]) -> list[str]:
    lines = _leaves_text(result)
    if positions := result.get("positions"):
        step = f" at step {result['positions_step']}, the first of these" if "positions_step" in result else ""
        what = "position differs" if len(positions) == 1 else "positions differ"
        lines += [f"{len(positions)} {what}{step}", *_rows([(found["name"], found["detail"]) for found in positions])]
    return lines


def _leaves_text(result: dict[str, Any]) -> list[str]:
    leaves, common = result["leaves"], result.get("common")
    if result["same"]:
        if common is None:
            return [f"identical ({result['compared']} leaves, bitwise)"]
        return [f"identical at all common steps ({len(common)}, from {common[0]} to {common[-1]})"]
    if common is None:
        steps = result["steps"]
        at_steps = f"step {steps['a']}" if steps["a"] == steps["b"] else f"step {steps['a']} in A, {steps['b']} in B"
        lines = [f"{len(leaves)} of {result['compared']} leaves differ ({at_steps})"]
    else:
        place = f"number {result['same_before'] + 1} of {len(common)} common steps"
        lines = [f"the runs diverge at step {result['step']}, {place}"]
        if result.get("leaves_known", True):
            lines.append(f"{len(leaves)} {'leaf differs' if len(leaves) == 1 else 'leaves differ'}")
        else:
            lines.append("which leaves differ is not known: a log was written with per_leaf=False")
    return lines + _rows([(leaf["path"], leaf["detail"]) for leaf in leaves])


def _rows(pairs: list[tuple[str, str]]) -> list[str]:
    shown = columns(pairs[:SHOWN], 2) if pairs else []
    texts = [f"{name}: {detail}" for name, detail in pairs]
    return first_lines(texts, [part for line in shown for part in fold(line, cli.terminal_width() - 2, 2)])


DIFF = cli.Command(_add_arguments, _print_differences)
