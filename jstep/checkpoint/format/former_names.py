"""Slots that have another name in checkpoints of earlier versions."""

from collections.abc import Collection, Mapping

from jstep.checkpoint.format.counts import SLOTS, Keys

_OF_ADADELTA = {"accum": "accumulator", "accum_update": "accumulator_update"}
"""The slots of `adadelta`, and their names in jstep 0.2."""


def former_paths(targets: Mapping[str, Keys], saved: Collection[str]) -> dict[str, str]:
    """Return path in the target → path in the checkpoint, for slots that were saved under a former name.

    Other optimizers have slots of these names, too (`ftrl` an `accum`, `adagrad` an `accumulator`): a leaf is renamed
    only if the target has all slots of the optimizer for its parameter, and the checkpoint has all of them under their
    former names.

    Args:
        targets: The paths of the target, and their keys.
        saved: The paths of the checkpoint.
    """
    renamed: dict[str, str] = {}
    for path, keys in targets.items():
        if len(keys) < 2 or keys[0] != SLOTS or path in saved:
            continue
        name = keys[1].rpartition("/")[2]
        scope = f"{SLOTS}/{keys[1].removesuffix(name)}"
        leaf = path.removeprefix(scope + name)
        if name in _OF_ADADELTA and all(
            scope + new + leaf in targets and scope + old + leaf in saved for new, old in _OF_ADADELTA.items()
        ):
            renamed[path] = scope + _OF_ADADELTA[name] + leaf
    return renamed
