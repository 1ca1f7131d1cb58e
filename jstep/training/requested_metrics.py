"""The optional metrics of a training step."""

from typing import Any

from jstep.core import trees

NORMS = ("grad_norm", "update_norm", "param_norm")
NOISE_SCALE = "noise_scale"


def requested_metrics(metrics: Any, num_microbatches: Any) -> tuple[tuple[str, ...], bool]:
    """Return the requested norms, and whether the noise scale is requested.

    Args:
        metrics: The argument of `minimize`.
        num_microbatches: The argument of `minimize`.

    Raises:
        TypeError: `metrics` does not consist of names.
        ValueError: A name is unknown, or the noise scale is requested without microbatches.
    """
    names = (*NORMS, NOISE_SCALE)
    if not isinstance(metrics, str | list | tuple | set | frozenset):
        raise TypeError(f"metrics={metrics!r}: must be names among {names}, got {type(metrics).__name__}")
    requested = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in requested:
        if name not in names:
            raise ValueError(f"metrics: {name!r} is unknown{trees.nearest(str(name), names)}; it takes any of {names}")
    if NOISE_SCALE in requested and num_microbatches == 1:
        raise ValueError(
            f"num_microbatches=1: must be at least 2 for metrics={metrics!r}, which compares the gradients of parts of "
            "a batch with their mean; give minimize num_microbatches=2 or more"
        )
    return tuple(name for name in requested if name != NOISE_SCALE), NOISE_SCALE in requested
