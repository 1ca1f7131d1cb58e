"""Weight decay that differs from leaf to leaf: the arguments of `add_weight_decay` and `decay_weights`."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from jstep.core.checks import as_number, kind, shown
from jstep.core.types import Params, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.directions import Values
from jstep.optimizers.hyper import checked
from jstep.optimizers.masks import Flag, first_match, mask

Decay: TypeAlias = ScalarOrSchedule | Mapping[str, ScalarOrSchedule]
"""A decay, or path or glob → the decay of the leaves that match."""
DECAY = "decay"
"""The flag for the decay of a leaf: the name of the hyperparameter and a factor on it, or None."""


def decay_arguments(name: str, weight_decay: Any, mask_given: Any) -> tuple[dict[str, Any], dict[str, Flag]]:
    """The hyperparameters and the flag of a weight decay.

    Args:
        name: The name of the hyperparameter.
        weight_decay: A number, an array, a schedule or `held`; or a mapping from paths or globs to these.
        mask_given: The leaves that decay, in the grammar of `var_list`; or path or glob → a factor ≥ 0 on the decay.

    Raises:
        TypeError: A value is not a number, or a key is not a string.
        ValueError: A value is out of its range.
    """
    given = _by_glob("weight_decay", weight_decay)
    if given is None:
        hyper = {name: checked("weight_decay", weight_decay, low=0)}
        which: Flag | None = None
    else:
        hyper = {f"{name}/{glob}": checked(f"weight_decay[{glob!r}]", one, low=0) for glob, one in given.items()}
        which = first_match("weight_decay", given)
    factors = _factors(mask_given)
    scales = mask("mask", mask_given) if factors is None else first_match("mask", factors)

    def decay(params: Params) -> list[Any]:
        names = scales(params)
        globs = [""] * len(names) if which is None else which(params)
        return [_of_leaf(name, which is not None, glob, one, factors) for glob, one in zip(globs, names, strict=True)]

    return hyper, {DECAY: decay}


def _of_leaf(name: str, is_split: bool, glob: str | None, scale: Any, factors: Mapping[str, float] | None) -> Any:
    if glob is None:
        return None
    factor = float(scale) if factors is None else 1.0 if scale is None else factors[scale]
    return None if factor == 0 else (f"{name}/{glob}" if is_split else name, factor)


def decay_of(h: Values) -> Any:
    """The decay of this leaf; None if it is known while tracing that the leaf does not decay."""
    if h.decay is None:
        return None
    name, factor = h.decay
    decay = h[name]
    if isinstance(decay, float) and decay == 0:
        return None
    return decay if factor == 1 else factor * decay


def is_zero(hyper: Mapping[str, Any]) -> bool:
    """Whether all decays are the constant 0."""
    return all(isinstance(value, float) and value == 0 for value in hyper.values())


def _by_glob(argument: str, given: Any) -> Mapping[str, Any] | None:
    if not isinstance(given, Mapping):
        return None
    for glob in given:
        if not isinstance(glob, str):
            raise TypeError(f"{argument}: {shown(glob)} must be a path or a glob, got {kind(glob)}")
    return given


def _factors(given: VarList) -> dict[str, float] | None:
    """Path or glob → factor, or None if the mask is not such a mapping (a tree of bools has no numbers)."""
    if not isinstance(given, Mapping) or not given or not all(isinstance(glob, str) for glob in given):
        return None
    if not all(isinstance(one, int | float | np.number) and not isinstance(one, bool) for one in given.values()):
        return None
    return {glob: as_number(one, f"mask[{glob!r}]", low=0) for glob, one in given.items()}
