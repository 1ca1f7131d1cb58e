"""Warn if a run resumes with another optimizer, or other past batches, than the run that saved it."""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from jstep.checkpoint import checkpoint_name
from jstep.data import BatchSequence
from jstep.timeline.lines import fields_with

_logger = logging.getLogger("jstep")


def warn_if_past_changed(batches: Any, where: str, prefix: str, restored: int, now: Mapping[str, Any]) -> None:
    """Log a warning if the batches before the restored step, or the optimizer, differ from those it was saved with.

    Nothing is logged if the timeline does not record which start saved the checkpoint, or has no card of it.

    Args:
        batches: The argument of `train`.
        where: The directory or URL of the checkpoints.
        prefix: Their prefix.
        restored: The step that was restored.
        now: The card of this run, with its first program.
    """
    then = _card_of_saver(where, prefix, restored) if restored else {}
    name = checkpoint_name(prefix, restored)
    if optimizers := changed_optimizer(then, now):
        _logger.warning(
            "train_step: %s was trained by the optimizer %s, and this run continues with %s on the same slots. To "
            "start with fresh slots, restore the parameters alone: Saver.restore_params.",
            name,
            *optimizers,
        )
    if not isinstance(batches, BatchSequence) or not isinstance(then.get("batches"), dict):
        return
    changes = changed_past(then["batches"], now["batches"], batches, restored)
    if changes:
        _logger.warning(
            "batches: those before step %d are not the ones that %s was trained on: %s. The run continues with batch "
            "%d of the new definition, so rows may be repeated or left out.",
            restored,
            name,
            "; ".join(changes),
            restored,
        )


def changed_optimizer(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str] | None:
    """The optimizers of two cards, if a stage of both has different ones; None if not, or if they are not known."""
    before, after = _optimizers(then), _optimizers(now)
    changes = ((before[stage], after[stage]) for stage in before.keys() & after.keys() if before[stage] != after[stage])
    return next(changes, None)


def _optimizers(card: Mapping[str, Any]) -> dict[Any, str]:
    """The names of the optimizer's rules, by the first step of the stage."""
    return {one.get("stage"): ", ".join(one["optimizer"]) for one in card.get("programs", ()) if one.get("optimizer")}


def changed_past(then: Mapping[str, Any], now: Mapping[str, Any], batches: BatchSequence, step: int) -> list[str]:
    """Describe the differences between two definitions of batches that concern the batches before a step.

    Args:
        then: The section `batches` of an earlier card.
        now: The section `batches` of the card of this run.
        batches: The batches of this run.
        step: The step.
    """
    if not then.keys() >= {"kind", "steps"}:
        return []  # a loader of the user
    if then["kind"] != now["kind"]:
        return [_change("kind", then["kind"], now["kind"])]
    return list(_changes(then, now, batches, step))


def _changes(then: Mapping[str, Any], now: Mapping[str, Any], batches: Any, step: int) -> Iterator[str]:
    is_shuffled = then["shuffle"] or now["shuffle"]
    for name in ("seed", "shuffle"):
        if then[name] != now[name] and is_shuffled:
            yield _change(name, then[name], now[name])
    if not (isinstance(then["steps"], list) and isinstance(now["steps"], list)):
        return  # recorded as a hash
    steps = [_first_steps(one["steps"], step) for one in (then, now)]
    if steps[0] != steps[1]:
        yield _change("steps", *([[one.start, one.stop, one.step] for one in each] for each in steps))
    end = 1 + max(max(one) for each in steps for one in each)
    for name in ("batch_size", "weights"):
        yield from _first_change(name, _stages(then.get(name), end), _stages(now.get(name), end))
    sizes = [_as_dict(one["rows"]) for one in (then, now)]
    for source, count in _as_dict(batches.rows_before(step)).items():
        if not count or any(source not in of for of in sizes):
            continue
        one, other = (of[source] for of in sizes)
        if one != other and (is_shuffled or count > min(one, other)):
            yield _change("rows" if source == "" else f"rows of {source!r}", one, other)
    if then.get("drop_remainder") != now.get("drop_remainder") and _had_remainder(now, end):
        yield _change("drop_remainder", then["drop_remainder"], now["drop_remainder"])


def _had_remainder(now: Mapping[str, Any], end: int) -> bool:
    """Whether an epoch ended, before a step, with rows that do not fill a batch."""
    rows, sizes = now["rows"], _stages(now["batch_size"], end)
    offset = 0
    for (first, size), stop in zip(sizes.items(), [*list(sizes)[1:], end], strict=True):
        steps = stop - first
        while steps > (whole := (rows - offset) // size):
            if (rows - offset) % size:
                return True
            offset, steps = 0, (steps - whole) % (rows // size) if rows % size == 0 else steps - whole
        offset += steps * size
    return False


def _as_dict(rows: Any) -> dict[str, Any]:
    """Source → number; `""` is the source of plain batches. Empty for a definition that is recorded as a hash."""
    if isinstance(rows, Mapping):
        return dict(rows)
    return {"": rows} if isinstance(rows, int) else {}


def _first_steps(parts: list[Any], count: int) -> list[range]:
    """The first `count` steps of a sequence."""
    found = []
    for first, stop, stride in parts:
        part = range(first, first + count * stride if stop is None else stop, stride)[:count]
        if part:
            found.append(part)
            count -= len(part)
    return found


def _stages(value: Any, end: int) -> dict[int, Any]:
    """First step → value, for the stages before `end`; without stages that change nothing, and sources of weight 0.

    Weights are rounded, as those of 70 and 10 and of 0.7 and 0.1 may differ in their last digit.
    """
    found: dict[int, Any] = {}
    last = None
    for first, of in sorted((int(key), of) for key, of in value.items()) if isinstance(value, Mapping) else ():
        kept = {name: round(weight, 12) for name, weight in of.items() if weight} if isinstance(of, Mapping) else of
        if first < end and kept != last:
            found[first] = last = kept
    return found


def _first_change(name: str, then: Mapping[int, Any], now: Mapping[int, Any]) -> Iterator[str]:
    if not then or not now:
        return  # recorded as a hash, which does not show from which step
    one = other = None
    for first in sorted({*then, *now}):
        one, other = then.get(first, one), now.get(first, other)
        if one != other:
            yield _change(f"{name} from step {first}", one, other)
            return


def _change(name: str, then: Any, now: Any) -> str:
    return f"{name}: {json.dumps(then)} then, {json.dumps(now)} now"


def _card_of_saver(where: str, prefix: str, step: int) -> dict[str, Any]:
    """The card of the start that saved the checkpoint of a step, with its programs; empty if that is not recorded."""
    cards: dict[str, dict[str, Any]] = {}
    saved_by = None
    try:
        for line in fields_with(where, "card", "checkpoint"):
            if line.get("prefix") != prefix:
                continue
            if line.get("kind") == "card":
                card = cards.setdefault(line.get("start", ""), {})
                programs = [*card.get("programs", ()), *line.get("programs", ())]
                card.update({**line, "programs": programs})
            if line.get("checkpoint") == step:
                saved_by = line.get("start")
    except OSError:
        return {}
    return {} if saved_by is None else cards.get(saved_by, {})
