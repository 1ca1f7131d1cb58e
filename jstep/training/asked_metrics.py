"""Metrics of a step that it computes if they are asked for."""

from typing import Any

from jstep.core import trees

NORMS = ("grad_norm", "update_norm", "param_norm")
NOISE_SCALE = "noise_scale"


def asked_metrics(metrics: Any, num_microbatches: Any) -> tuple[tuple[str, ...], bool]:
    """The norms that are asked for, and whether the noise of the gradient is.

    Args:
        metrics: What `minimize` was given.
        num_microbatches: Likewise.

    Raises:
        TypeError: They are not names.
        ValueError: A name is unknown, or there are no microbatches to measure noise by.
    """
    names = (*NORMS, NOISE_SCALE)
    if not isinstance(metrics, str | list | tuple | set | frozenset):
        raise TypeError(f"metrics={metrics!r}: must be names among {names}, got {type(metrics).__name__}")
    asked = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in asked:
        if name not in names:
            raise ValueError(f"metrics: {name!r} is unknown{trees.nearest(str(name), names)}; it takes any of {names}")
    if NOISE_SCALE in asked and num_microbatches == 1:
        raise ValueError(
            f"num_microbatches=1: must be at least 2 for metrics={metrics!r}, which compares the gradients of parts of "
            "a batch with their mean; give minimize num_microbatches=2 or more"
        )
    return tuple(name for name in asked if name != NOISE_SCALE), NOISE_SCALE in asked
