"""Tagged JSON: a dict with one key that begins with "$" holds what JSON lacks, such as a tuple.

Decoding builds values of this module's types and no others. Unlike unpickling, it cannot run code.
"""

import base64
import collections
import functools
import hashlib
import math
import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jstep.core.tables import printable
from jstep.core.trees import Tree
from jstep.stores import tagged_arrays
from jstep.stores.tagged_arrays import LARGE, UnknownPartError, UnsupportedError
from jstep.stores.untrusted import UntrustedError, check_keys

_DEEPEST = 80
"""The maximum levels of nested JSON; a checkpoint accepts 100 in all."""
_MAX_SEED_BITS = 2**16
_MAX_BITS = 4096
"""The maximum bits of an integer: Python does not write much longer ones in decimal."""
_FILE = "$file"
"""The key of a reference to a file, instead of large bytes."""


class ExternalBytes:
    """Bytes of a checkpoint's file, in memory or loaded when needed; equal if the bytes are."""

    def __init__(self, data: bytes | None = None, load: Callable[[], bytes] | None = None) -> None:
        self._data = data
        self.load = load

    def read(self) -> bytes:
        data = self._data  # another thread may be writing them
        if data is None:
            if self.load is None:
                raise RuntimeError(
                    "these bytes were written to a checkpoint, and are not kept in memory"
                )
            data = self.load()
        return data

    @functools.cached_property
    def hash(self) -> bytes:
        return hashlib.blake2b(self.read(), digest_size=20).digest()

    def written(self) -> None:
        """Release the memory, but keep the hash: a file has the bytes now."""
        self.hash  # noqa: B018  computed now, and cached
        self._data = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, ExternalBytes) and self.hash == other.hash

    __hash__ = None  # type: ignore[assignment]


class AttachedFiles(dict[str, ExternalBytes]):
    """The large bytes of values that become JSON, by the names of their files."""

    def __init__(self, stem: str) -> None:
        super().__init__()
        self._stem = stem

    def add(self, data: bytes | ExternalBytes) -> dict[str, str]:
        name = f"{self._stem}{len(self)}"
        self[name] = data if isinstance(data, ExternalBytes) else ExternalBytes(data)
        return {_FILE: name}


def as_json(copy: Any, files: AttachedFiles | None = None) -> Any:
    """Finish the encoding of `copy_encodable`: bytes become text, or if large, a file of `files`.

    Without `files`, all become text.
    """
    kind = type(copy)
    if kind is dict:
        return {key: as_json(item, files) for key, item in copy.items()}
    if kind is list:
        if _are_plain(copy):
            return list(copy)
        return [as_json(item, files) for item in copy]
    if kind is ExternalBytes:
        if files is None:
            return as_json(copy.read())
        return files.add(copy)
    if kind is bytes:
        if files is not None and len(copy) > LARGE:
            return files.add(copy)
        return base64.b64encode(copy).decode()
    if isinstance(copy, jax.Array):
        return as_json(tagged_arrays.host_parts(copy), files)
    return copy


def resolve_files(encoded: object, load: Callable[[str], ExternalBytes]) -> Any:
    """Undo `as_json` for files: return the JSON with `ExternalBytes` in place of references."""
    if type(encoded) is list:
        if _are_plain(encoded):
            return encoded
        return [resolve_files(item, load) for item in encoded]
    if type(encoded) is not dict:
        return encoded
    if encoded.keys() == {_FILE} and type(encoded[_FILE]) is str:
        return load(encoded[_FILE])
    return {key: resolve_files(item, load) for key, item in encoded.items()}


class FilesOnce:
    """A `load` for `resolve_files` that rejects a second reference to a file.

    If 4,000 arrays named one file, each would be a copy of it. `AttachedFiles` never names a file
    twice.
    """

    def __init__(self, read: Callable[[str], bytes]) -> None:
        self._read = read
        self._loaded = set[str]()

    def __call__(self, name: str) -> ExternalBytes:
        if name in self._loaded:
            raise UntrustedError(f"the file {name!r:.80} is named more than once")
        self._loaded.add(name)
        return ExternalBytes(load=lambda: self._read(name))


def encoded_size(copy: Any) -> int:
    """Return about how many bytes a copy has; large ones have more than `LARGE`."""
    kind = type(copy)
    if kind is dict:
        return sum(map(encoded_size, copy.values()))
    if kind is list:
        if _are_plain(copy):
            return 8 * len(copy)
        return sum(map(encoded_size, copy))
    if kind is ExternalBytes:
        return LARGE + 1
    if kind is bytes or kind is str:
        return len(copy)
    return int(getattr(copy, "nbytes", 8))


def copy_encodable(value: object) -> Any:
    """Encode a value for `as_json`: like JSON, but bytes stay bytes, in a fraction of the time.

    The result shares nothing mutable with the value. A random generator must be in one place.
    """
    return _encoded(value, 0, set())


_PLAIN = frozenset({str, bool, type(None)})


def _encoded(value: Any, depth: int, seen: set[int]) -> Any:
    """Encode a value; `seen` are the identities of the random generators so far."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int and value.bit_length() <= _MAX_BITS:
        return value
    if kind is float and math.isfinite(value):
        return value
    if depth > _DEEPEST:
        raise UnsupportedError("is nested too deeply, or contains itself")
    if kind is list:
        if _are_plain(value):
            return list(value)
        return _each(enumerate(value), depth + 1, seen)
    if kind is tuple:
        if _are_plain(value):
            return {"$tuple": list(value)}
        return {"$tuple": _each(enumerate(value), depth + 2, seen)}
    if kind is dict and all(type(key) is str for key in value) and not _is_tagged(value):
        return dict(zip(value, _each(value.items(), depth + 1, seen), strict=True))
    if kind is dict or kind is collections.OrderedDict:
        keys = _each((("key", key) for key in value), depth + 3, seen)
        pairs = zip(keys, _each(value.items(), depth + 3, seen), strict=True)
        tag = "$dict" if kind is dict else "$ordered_dict"
        return {tag: [list(pair) for pair in pairs]}
    if kind is bytes:
        return {"$bytes": value}
    if isinstance(value, jax.Array):
        return tagged_arrays.jax_parts(value)
    if isinstance(value, np.generic):
        kind = np.generic
    elif kind.__module__ == "torch" and kind.__name__ == "Tensor":  # torch need not be installed
        return {"$tensor": _encoded(tagged_arrays.tensor_parts(value), depth + 1, seen)}
    if kind not in _PARTS:
        raise UnsupportedError(f"is a value of type {kind.__module__}.{kind.__qualname__}")
    if kind in _RANDOM:
        _check_first(value, kind, seen)
    tag, parts = _PARTS[kind]
    return {tag: _encoded(parts(value), depth + 1, seen)}


def _check_first(value: Any, kind: type, seen: set[int]) -> None:
    """Check that a random generator is not in `seen`, and add it there."""
    generator = value
    if kind is np.random.RandomState:
        # Two of them may share the generator of their bits.
        generator = getattr(value, "_bit_generator", value)
    if id(generator) in seen:
        raise UnsupportedError(
            f"is a {kind.__name__} that is in several places, which would draw the "
            "same numbers (keep one)"
        )
    seen.add(id(generator))


def _each(items: Iterable[tuple[Any, Any]], depth: int, seen: set[int]) -> list[Any]:
    """Encode the second items of pairs; the first ones are for the paths of errors."""
    encoded: list[Any] = []
    for label, item in items:
        try:
            encoded.append(_encoded(item, depth, seen))
        except UnsupportedError as error:
            path = f"[{label!r:.50}]{error.path}"
            if len(path) > 200:
                # The value may contain itself: its path is then as long as the nesting is deep.
                path = f"{path[:200]}…"
            raise UnsupportedError(error.what, path) from None
    return encoded


def _are_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether JSON can represent all values as they are: a fast path for many numbers."""
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return True
    return kinds == {int} and -(2**63) <= min(values) <= max(values) < 2**63


def decode(value: object) -> Any:
    """Decode a value from `as_json` or `copy_encodable`, which is not trusted."""
    if isinstance(value, list):
        return list(map(decode, value))
    if isinstance(value, ExternalBytes):
        return value.read()
    if not isinstance(value, dict):
        return value
    if not _is_tagged(value):
        return {key: decode(item) for key, item in value.items()}
    ((tag, parts),) = value.items()
    if tag not in _DECODERS:
        # Such as those of early versions, for objects in several places and arrays that overlap.
        raise UnknownPartError(f"the tag {tag!r:.50}")
    parts = decode(parts)
    try:
        return _DECODERS[tag](parts)
    except UnknownPartError:
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        MemoryError,
        ImportError,
    ) as error:
        raise ValueError(f"{tag}: {type(error).__name__}: {printable(error):.200}") from None


def _is_tagged(value: dict[Any, Any]) -> bool:
    return len(value) == 1 and next(iter(value))[:1] == "$"


def _pairs(pairs: Any) -> list[Any]:
    check_keys(key for key, _ in pairs)
    return list(pairs)


def _bytes(data: Any) -> bytes:
    if isinstance(data, bytes):
        return data
    return base64.b64decode(data, validate=True)


# Random generators

RandomGenerator = (
    np.random.Generator | np.random.RandomState | np.random.BitGenerator | random.Random
)


def _bits_parts(bits: np.random.BitGenerator) -> dict[str, Any]:
    seed: Any = bits.seed_seq
    if type(seed) is not np.random.SeedSequence:
        seed = None
    return {"state": bits.state, "seed": seed}


def _bits(parts: Any) -> np.random.BitGenerator:
    tagged_arrays.check_known(parts, ("state", "seed"))
    state = parts["state"]
    # NumPy does not check the position of a generator in its buffer of random numbers, and would
    # read past its end.
    if not (0 <= state["state"].get("pos", 0) <= 624 and 0 <= state.get("buffer_pos", 0) <= 4):
        raise ValueError("pos must be from 0 to 624, and buffer_pos from 0 to 4")
    seed = parts["seed"]
    if seed is not None and type(seed) is not np.random.SeedSequence:
        raise ValueError(f"seed={seed!r:.50} is not a seed sequence")
    bits: Any = _BIT_GENERATORS[state["bit_generator"]](0)
    bits.__setstate__((state, seed))
    return bits


def _random_state(state: Any) -> np.random.RandomState:
    generator = np.random.RandomState(_bits({"state": state, "seed": None}))
    generator.set_state(state)
    return generator


def _seed(parts: Any) -> np.random.SeedSequence:
    tagged_arrays.check_known(parts, ("entropy", "spawn_key", "pool_size", "n_children_spawned"))
    # Mixing a seed takes time proportional to the pool times the words of the seed, and dividing an
    # integer into words, to the square of its bits.
    if parts["pool_size"] > 1024:
        raise ValueError("pool_size must be at most 1024")
    integers: list[Any] = []
    for seed in [parts["entropy"], *parts["spawn_key"]]:
        integers += seed if isinstance(seed, list | tuple) else [seed]
    bits = sum(seed.bit_length() for seed in integers if isinstance(seed, int))
    if bits > _MAX_SEED_BITS or len(integers) > _MAX_SEED_BITS:
        raise ValueError(f"entropy and spawn_key must have at most {_MAX_SEED_BITS} bits")
    return np.random.SeedSequence(**parts)


def _python_random(state: Tree) -> random.Random:
    generator = random.Random(0)
    generator.setstate(state)
    return generator


def set_generator(generator: Any, saved: Any) -> None:
    """Set a random generator to the state of another one; it also spawns the same generators.

    Raises:
        ValueError: They are of different kinds.
    """
    # A Generator has a bit generator; the others have none.
    bits = getattr(generator, "bit_generator", generator)
    saved_bits = getattr(saved, "bit_generator", saved)
    if type(generator) is not type(saved) or type(bits) is not type(saved_bits):
        raise ValueError(
            f"must be a {type(saved_bits).__name__}, as in the checkpoint, got a "
            f"{type(bits).__name__}"
        )
    if isinstance(bits, random.Random):
        bits.setstate(saved_bits.getstate())
    elif isinstance(bits, np.random.RandomState):
        bits.set_state(saved_bits.get_state(legacy=False))
    elif saved_bits.seed_seq is None:  # it cannot spawn
        bits.state = saved_bits.state
    else:
        bits.__setstate__((saved_bits.state, _seed(saved_bits.seed_seq.state)))


# All types

_BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    kind.__name__: kind
    for kind in (
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.MT19937,
        np.random.Philox,
        np.random.SFC64,
    )
}
_RANDOM = frozenset(
    {np.random.Generator, np.random.RandomState, random.Random, *_BIT_GENERATORS.values()}
)


def _scalar_parts(scalar: Any) -> Any:
    return tagged_arrays.array_parts(np.asarray(scalar))


def _decode_scalar(parts: Any) -> Any:
    return tagged_arrays.decode_array(parts)[()]


def _random_state_parts(generator: np.random.RandomState) -> Any:
    return generator.get_state(legacy=False)


def _seed_parts(seed: Any) -> dict[str, Any]:
    return dict(seed.state)


def _dict(pairs: Any) -> dict[Any, Any]:
    return dict(_pairs(pairs))


def _ordered_dict(pairs: Any) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict(_pairs(pairs))


def _int(text: Any) -> int:
    return int(text, 16)


_PARTS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    int: ("$int", hex),
    float: ("$float", repr),
    np.generic: ("$scalar", _scalar_parts),
    np.ndarray: ("$array", tagged_arrays.array_parts),
    np.random.Generator: ("$generator", operator.attrgetter("bit_generator")),
    np.random.RandomState: ("$random_state", _random_state_parts),
    np.random.SeedSequence: ("$seed_sequence", _seed_parts),
    random.Random: ("$random", random.Random.getstate),
    **dict.fromkeys(_BIT_GENERATORS.values(), ("$bit_generator", _bits_parts)),
}
"""By type: the tag, and the conversion to simpler values."""
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$bytes": _bytes,
    "$tuple": tuple,
    "$dict": _dict,
    "$ordered_dict": _ordered_dict,
    "$int": _int,
    "$float": float,
    "$scalar": _decode_scalar,
    "$array": tagged_arrays.decode_array,
    "$tensor": tagged_arrays.decode_tensor,
    "$jax": tagged_arrays.decode_jax_array,
    "$generator": np.random.Generator,
    "$random_state": _random_state,
    "$seed_sequence": _seed,
    "$random": _python_random,
    "$bit_generator": _bits,
}
"""By tag: the inverse, which rejects anything else."""
