"""Tagged JSON: a dict with one key, which begins with "$", holds a value that JSON lacks, such as a tuple or an array.

Decoding builds values of the types of this module and no others. Unlike unpickling, it cannot run code.
"""

import base64
import collections
import importlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

_DEEPEST = 80  # levels of nested JSON; a checkpoint accepts 100 in all
_LONGEST = 4096  # bits of an integer: Python refuses to write much longer ones in decimal

SUPPORTED = (
    "numbers, strings, bytes, None, lists, tuples, sets, dicts, NumPy arrays, scalars and random generators, "
    "random.Random, and torch tensors"
)
"""The types that can be encoded, for error messages."""


class UnsupportedError(TypeError):
    """A value cannot be encoded.

    Attributes:
        what: What the value is.
        path: Its path in the outermost value, such as `['epoch'][0]`.
    """

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(f"{path} {what}".strip())
        self.what, self.path = what, path


def as_json(copy: Any) -> Any:
    """Finish the encoding of a value from `copied`, whose bytes become text. JSON stays as it is."""
    if type(copy) is bytes:
        return base64.b64encode(copy).decode()
    if type(copy) is list:
        return [as_json(item) for item in copy]
    return {key: as_json(item) for key, item in copy.items()} if type(copy) is dict else copy


def copied(value: Any, depth: int = 0) -> Any:
    """Encode a value for `as_json`: like JSON, but bytes stay bytes, which takes a small part of the time.

    The result shares nothing with the value that can change.

    Args:
        value: The value.
        depth: The number of JSON levels around it.

    Raises:
        UnsupportedError: A part of the value is of another type, or contains itself.
    """
    of = type(value)
    if of is str or of is bool or value is None:
        return value
    if of is int and value.bit_length() <= _LONGEST:
        return value
    if of is float and math.isfinite(value):
        return value
    if depth > _DEEPEST:
        raise UnsupportedError("is nested too deeply, or contains itself")
    if of is list:
        return list(value) if _are_plain(value) else _each(enumerate(value), depth + 1)
    if of is tuple:
        return {"$tuple": list(value) if _are_plain(value) else _each(enumerate(value), depth + 2)}
    if of is set or of is frozenset:
        items = _each((("element", item) for item in value), depth + 2)
        return {f"${of.__name__}": sorted(items, key=_as_text)}  # equal sets become equal JSON
    if of is dict and all(type(key) is str for key in value) and not _is_tagged(value):
        return dict(zip(value, _each(value.items(), depth + 1), strict=True))
    if of is dict or of is collections.OrderedDict:
        keys = _each((("key", key) for key in value), depth + 3)
        pairs = zip(keys, _each(value.items(), depth + 3), strict=True)
        return {"$dict" if of is dict else "$ordered_dict": [list(pair) for pair in pairs]}
    if of is bytes:
        return {"$bytes": value}
    torch = sys.modules.get("torch")  # if there is a tensor, it was imported
    if of in _TAGS:
        tag = _TAGS[of]
    elif isinstance(value, np.generic):
        tag = _SCALAR
    elif torch is not None and of is torch.Tensor:
        tag = _TENSOR
    else:
        raise UnsupportedError(f"is a value of type {of.__module__}.{of.__qualname__}")
    return {tag.key: copied(tag.parts(value), depth + 1)}


def _as_text(copy: Any) -> str:
    return json.dumps(as_json(copy))


def _are_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether JSON holds all values as they are. Positions are copied with each batch, and may list many numbers."""
    kinds = set(map(type, values))
    return kinds <= {str, bool, type(None)} or (kinds == {int} and -(2**63) <= min(values) <= max(values) < 2**63)


def _each(items: Iterable[tuple[Any, Any]], depth: int) -> list[Any]:
    """Encode the second items of pairs; the path in an error has the first one."""
    found: list[Any] = []
    label: Any = None
    try:
        for pair in items:
            label = pair[0]
            found.append(copied(pair[1], depth))
    except UnsupportedError as error:
        path = f"[{label!r:.50}]{error.path}"
        # The path of a value that contains itself is as long as the nesting is deep.
        raise UnsupportedError(error.what, path if len(path) <= 200 else f"{path[:200]}…") from None
    return found


def decode(value: Any) -> Any:
    """Decode a value from `as_json`. Nothing in it is trusted.

    Raises:
        ValueError: `as_json` did not write the value, or what it needs is not installed.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not _is_tagged(value):
        return {key: decode(item) for key, item in value.items()}
    ((key, parts),) = value.items()
    if key not in _WHOLE:
        raise ValueError(f"the tag {key!r:.50} is not known; a newer version of jstep may have written it")
    parts = decode(parts)
    try:
        return _WHOLE[key](parts)
    except ImportError as error:
        raise ValueError(str(error)) from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"{key}: {type(error).__name__}: {error!s:.200}") from None


def _is_tagged(value: dict[Any, Any]) -> bool:
    return len(value) == 1 and next(iter(value))[:1] == "$"


# Arrays


def _array_parts(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    if array.size and not array.itemsize:
        raise UnsupportedError(f"is a NumPy array of dtype {array.dtype}, whose elements have no bytes")
    return {"dtype": _dtype_parts(array.dtype), "shape": list(array.shape), "data": array.tobytes()}


def _dtype_parts(dtype: np.dtype[Any]) -> Any:
    """Return a description of a dtype: a name such as '<f4' or 'bfloat16', or a list of fields."""
    names: tuple[Any, ...] = () if dtype.hasobject else (dtype.str, dtype.name, npy.dtype_to_descr(dtype))
    for parts in names:
        try:
            if npy.descr_to_dtype(parts) == dtype:
                return parts
        except TypeError:
            pass
    raise UnsupportedError(f"is a NumPy array of dtype {dtype}")


def _array(parts: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = npy.descr_to_dtype(parts["dtype"]), _shape(parts["shape"]), parts["data"]
    # Elements without bytes would need no data, and NumPy would still give memory to some of them.
    elements = math.prod(shape)
    if dtype.hasobject or len(data) != elements * dtype.itemsize or (elements and not dtype.itemsize):
        raise ValueError(f"an array of {dtype} and shape {shape} does not have {len(data)} bytes")
    return np.ndarray(shape, dtype, bytearray(data)).copy()


def _shape(value: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{value!r:.50} is not a shape")
    return tuple(value)


def _tensor_parts(tensor: Any) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedError(f"is a torch tensor that is sparse, quantized or without values, of dtype {name}")
    flat = tensor.detach().cpu().reshape(-1).resolve_conj().resolve_neg().contiguous()
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return {"dtype": name, "shape": list(tensor.shape), "data": flat.view(torch.uint8).numpy().tobytes()}


def _tensor(parts: Any) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise ImportError("it holds a torch tensor, and torch cannot be imported; install torch") from None
    dtype, shape, data = getattr(torch, parts["dtype"]), _shape(parts["shape"]), parts["data"]
    if len(data) != math.prod(shape) * torch.empty(0, dtype=dtype).element_size():
        raise ValueError(f"a tensor of {dtype} and shape {shape} does not have {len(data)} bytes")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


# Random generators


def _bits_parts(bits: np.random.BitGenerator) -> dict[str, Any]:
    seed: Any = bits.seed_seq
    return {"state": bits.state, "seed": seed if type(seed) is np.random.SeedSequence else None}


def _bits(parts: Any) -> np.random.BitGenerator:
    state, seed = parts["state"], parts["seed"]
    make = _BIT_GENERATORS[state["bit_generator"]]
    # NumPy does not check the position of a generator in its buffer of random numbers, and would read past its end.
    if make is np.random.MT19937 and not 0 <= state["state"]["pos"] <= 624:
        raise ValueError("pos must be from 0 to 624")
    if make is np.random.Philox and not 0 <= state["buffer_pos"] <= 4:
        raise ValueError("buffer_pos must be from 0 to 4")
    if not (seed is None or isinstance(seed, np.random.SeedSequence)):
        raise ValueError("the seed must be a SeedSequence")
    bits = make(seed)
    bits.state = state
    return bits


def _generator(bits: Any) -> np.random.Generator:
    if not isinstance(bits, np.random.BitGenerator):
        raise ValueError("it has no bit generator")
    return np.random.Generator(bits)


def _random_state(state: Any) -> np.random.RandomState:
    generator = np.random.RandomState(_bits({"state": state, "seed": None}))
    generator.set_state(state)
    return generator


def _seed(parts: Any) -> np.random.SeedSequence:
    if not 4 <= parts["pool_size"] <= 1024:  # mixing takes time in proportion to its square
        raise ValueError("pool_size must be from 4 to 1024")
    return np.random.SeedSequence(
        parts["entropy"],
        spawn_key=parts["spawn_key"],
        pool_size=parts["pool_size"],
        n_children_spawned=parts["n_children_spawned"],
    )


def _python_random(state: Any) -> random.Random:
    generator = random.Random(0)
    generator.setstate(state)
    return generator


# All types


class _Tag(NamedTuple):
    """Conversion of values of one type to simpler values, and back.

    Attributes:
        key: The key in JSON.
        parts: Returns simpler values for a value.
        whole: The inverse of `parts`; it may be given anything, and raises an exception if it does not fit.
    """

    key: str
    parts: Callable[[Any], Any]
    whole: Callable[[Any], Any]


_BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    of.__name__: of
    for of in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
_SCALAR = _Tag("$scalar", lambda scalar: _array_parts(np.asarray(scalar)), lambda parts: _array(parts)[()])
_TENSOR = _Tag("$tensor", _tensor_parts, _tensor)
_TAGS: dict[type, _Tag] = {
    int: _Tag("$int", hex, lambda text: int(text, 16)),
    float: _Tag("$float", repr, float),
    complex: _Tag("$complex", lambda number: [number.real, number.imag], lambda parts: complex(*parts)),
    bytearray: _Tag("$bytearray", bytes, bytearray),
    np.ndarray: _Tag("$array", _array_parts, _array),
    np.random.Generator: _Tag("$generator", lambda generator: generator.bit_generator, _generator),
    np.random.RandomState: _Tag("$random_state", lambda generator: generator.get_state(legacy=False), _random_state),
    np.random.SeedSequence: _Tag("$seed_sequence", lambda seed: dict(seed.state), _seed),
    random.Random: _Tag("$random", random.Random.getstate, _python_random),
    **{of: _Tag("$bit_generator", _bits_parts, _bits) for of in _BIT_GENERATORS.values()},
}
_WHOLE: dict[str, Callable[[Any], Any]] = {
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$ordered_dict": collections.OrderedDict,
    **{tag.key: tag.whole for tag in (*_TAGS.values(), _SCALAR, _TENSOR)},
}
