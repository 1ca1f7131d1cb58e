"""Validation of the arguments of `SummaryWriter`, and the values of hyperparameters."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jstep.core.checks import kind, shown
from jstep.core.trees import is_traced
from jstep.summary.proto import decode_error, hparams_protos, is_message, proto
from jstep.summary.values import Summary, keep


def as_step(step: Any) -> Any:
    """Check a step. An array is copied, since it may be donated, and read on the writer's thread."""
    if step is None:
        return None
    if is_traced(step):
        raise TypeError(
            "global_step is traced: the writer was called inside a function that JAX transforms (jit, grad)"
        )
    if isinstance(step, jax.Array | np.ndarray | np.generic):
        if not np.issubdtype(step.dtype, np.integer) or step.shape != ():
            raise TypeError(f"global_step={shown(step, 40)}: must be an integer scalar, got {kind(step)}")
        return keep(step)
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"global_step={shown(step)}: must be an integer, got {kind(step)}")
    return step


_HINTS: dict[type, str] = {
    float: "; summary.scalar(tag, value) makes one",
    dict: "; summary.scalar(names, values) makes one from numbers, summaries_in finds those in a tree",
    list: "; summary.merge makes one from several",
    tuple: "; summary.merge makes one from several",
}


def as_serialized(x: Any, name: str, method: str, other: str) -> bytes:
    """Serialize a message of this name; both tensorboard's and TensorFlow's protos are accepted."""
    if isinstance(x, bytes | bytearray | memoryview):
        data = bytes(x)
        try:
            proto(name).FromString(data)
        except decode_error() as error:
            raise TypeError(f"{method}: {len(data)} bytes that are not a serialized {name}: {error}") from error
        return data
    if not is_message(x, name):
        other_name = "Event" if name == "Summary" else "Summary"
        hint = f"; {other} takes it" if is_message(x, other_name) or type(x) is Summary else _HINTS.get(type(x), "")
        raise TypeError(f"{method}: expected {'an' if name == 'Event' else 'a'} {name}, not {type(x).__name__}{hint}")
    serialized: bytes = x.SerializeToString()
    return serialized


_PLUGIN = "hparams"


def hparams_values(hparams: Mapping[str, Any], metrics: Mapping[str, Any] | None, now: float) -> list[Any]:
    """Return the `Summary.Value`s of a run's hyperparameters and results.

    No experiment is written, so that TensorBoard derives the columns from the runs.

    Raises:
        TypeError: An entry has a type that the tab does not support; the message names the entry.
    """
    api, plugin = hparams_protos()
    flat = dict(_flat(hparams, "hparams"))
    group = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    start = plugin.SessionStartInfo(group_name=group, start_time_secs=now)
    for name, value in flat.items():
        kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else "number_value"
        setattr(start.hparams[name], kind, value)
    values = [_value("_hparams_/session_start_info", plugin.HParamsPluginData(session_start_info=start))]
    if metrics is not None:
        for name, value in _flat(metrics, "metrics"):
            if isinstance(value, str):
                raise TypeError(f"add_hparams: metrics[{name!r}] must be a number, not {value!r}")
            values.append(proto("Summary").Value(tag=name, simple_value=float(value)))
        end = plugin.SessionEndInfo(status=api.STATUS_SUCCESS, end_time_secs=now)
        values.append(_value("_hparams_/session_end_info", plugin.HParamsPluginData(session_end_info=end)))
    return values


def _flat(entries: Any, what: str, prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    if not isinstance(entries, Mapping):
        raise TypeError(f"add_hparams: {what} must be a mapping from names to values, not {type(entries).__name__}")
    for key, value in entries.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, what, f"{name}/")
            continue
        if isinstance(value, np.generic | np.ndarray | jax.Array) and np.shape(value) == ():
            value = value.item()
        if not isinstance(value, bool | int | float | str):
            raise TypeError(
                f"add_hparams: {what}[{name!r}] must be a bool, a number or a string, not "
                f"{type(value).__name__} {value!r}; give str(value), or the number that describes it"
            )
        yield name, value


def _value(tag: str, data: Any) -> Any:
    types = proto("types")
    return proto("Summary").Value(
        tag=tag,
        metadata={"plugin_data": {"plugin_name": _PLUGIN, "content": data.SerializeToString()}},
        tensor=proto("TensorProto")(dtype=types.DT_FLOAT, tensor_shape=proto("TensorShapeProto")(dim=[{"size": 0}])),
    )
