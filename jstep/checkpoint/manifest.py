"""The manifest of a checkpoint: a JSON description of its leaves and files, with checksums.

Orbax checks nothing: a flipped byte in its files restores silently. The manifest covers every byte: those of
the files by their checksums, its own by the checksum in its last line.
"""

import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.checks import shown
from jstep.core.exceptions import Picklable

NAME = "manifest.json"
FORMAT = 1
_LARGEST = 2**58  # elements of any dtype that NumPy can index, also where an axis has none
_DEEPEST = 100  # levels of nesting; Python parses JSON recursively, and the stack may be deep already
_SEAL = ',\n "crc32": "'


class CheckpointError(Picklable, RuntimeError):
    """A checkpoint could not be written, or is corrupted."""


class CorruptedError(CheckpointError):
    """A checkpoint is corrupted.

    Attributes:
        problems: Descriptions of what is wrong with which file or object.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


class UnsupportedFormatError(CheckpointError):
    """A checkpoint is intact, and was written in a format that this version does not read."""


class Extra(NamedTuple):
    """The `extra` of a save, or a part of it, with large bytes, which are files of the checkpoint and not in its text.

    Attributes:
        values: JSON, as for `Saver.save`, which refers to the files by their names.
        files: Name of a file → its `LargeBytes`: the files that this process writes. No two processes have files of the
            same name.
    """

    values: Any
    files: Mapping[str, Any]

    def is_same(self, other: "Extra") -> bool:
        """Whether two are equal, whatever the order of their keys."""
        mine, its = (json.dumps(one.values, sort_keys=True) for one in (self, other))
        return mine == its and self.files == other.files


def json_copy(value: object, name: str) -> Any:
    """Return the value as JSON decodes it: tuples become lists.

    Raises:
        TypeError: The value is not a JSON value (the message says where), or contains itself.
    """
    _check_json(value, name, ())
    return json.loads(json.dumps(value))


def _check_json(value: object, name: str, above: tuple[int, ...]) -> None:
    if id(value) in above:
        raise TypeError(f"{name}: contains itself, which JSON cannot represent; leave that part out")
    if len(above) > _DEEPEST:
        raise TypeError(f"{name[:100]}…: is nested deeper than {_DEEPEST} levels; flatten it")
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise TypeError(f"{name}: the key {shown(key)} is {type(key).__name__}; JSON keys must be strings")
            _check_json(item, f"{name}[{key!r}]", (*above, id(value)))
    elif not isinstance(value, str | int | float | None):
        hint = "; convert it with .tolist()" if hasattr(value, "tolist") else ""
        raise TypeError(
            f"{name}: {type(value).__name__} is not a JSON value{hint}. extra takes dicts with string keys, lists, "
            "strings, numbers, booleans and None; put arrays into the state"
        )


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A leaf of a state in a manifest, saved or left out.

    Attributes:
        path: The path of the leaf, such as `params/dense/kernel`.
        keys: The keys of the path, which may contain slashes themselves.
        shape: The shape of the leaf.
        dtype: The dtype of the leaf, such as `bfloat16` or `key<fry>`.
    """

    path: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    def _json(self, **own: object) -> dict[str, Any]:
        """Return a short dict, without keys that follow from the path."""
        keys = {} if list(self.keys) == self.path.split("/") else {"keys": list(self.keys)}
        return {"path": self.path, "shape": list(self.shape), "dtype": self.dtype, **own, **keys}

    @staticmethod
    def _fields(data: Mapping[str, Any]) -> tuple[str, tuple[str, ...], tuple[int, ...], str]:
        path = _text(data["path"])
        keys = tuple(map(_text, data.get("keys", path.split("/")))) or _refuse("a leaf without keys")
        return path, keys, tuple(map(_count, data["shape"])), _text(data["dtype"])


_OPTIONAL = ("stored_as", "key_impl", "half")


@dataclasses.dataclass(frozen=True)
class Leaf(Recorded):
    """One leaf of a saved state.

    Attributes:
        nbytes: Its size in memory.
        array: The name of the stored array; None if the leaf has no elements and nothing is stored.
        stored_as: The dtype on disk, if the storage format does not support the dtype of the leaf.
        key_impl: The implementation of a PRNG key, whose raw data is stored.
        half: The name of the stored array with the other half of the numbers: scales or a remainder of `compact`.
    """

    nbytes: int
    array: str | None
    stored_as: str | None = None
    key_impl: str | None = None
    half: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a short dict, without what follows from the path."""
        array = {} if self.array == self.path else {"array": self.array}
        others = {name: getattr(self, name) for name in _OPTIONAL if getattr(self, name) is not None}
        return self._json(bytes=self.nbytes) | array | others

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Leaf":
        """Return the leaf that `to_json` wrote."""
        path, keys, shape, dtype = cls._fields(data)
        array = _text_or_none(data.get("array", path))
        if array is None and (0 not in shape or math.prod(filter(None, shape)) >= _LARGEST):
            _refuse(f"{path!r:.50} of shape {shape!s:.50} has elements, and they are not stored")
        others = (_text_or_none(data.get(name)) for name in _OPTIONAL)
        return cls(path, keys, shape, dtype, _count(data["bytes"]), array, *others)


@dataclasses.dataclass(frozen=True)
class LeftOut(Recorded):
    """A leaf of the state that was not saved, by `Saver(leave_out=…)`.

    Attributes:
        fingerprint: 16 hexadecimal digits, as in `jstep.fingerprint(state, per_leaf=True)`.
    """

    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """Return a short dict, without keys that follow from the path."""
        return self._json(fingerprint=self.fingerprint)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LeftOut":
        """Return the leaf that `to_json` wrote."""
        return cls(*cls._fields(data), _text(data["fingerprint"]))


@dataclasses.dataclass(frozen=True)
class RetainedSteps:
    """The retention state, which is written into every manifest.

    Attributes:
        steps: Steps of the checkpoints that are kept permanently.
        since: The time up to which hours are accounted for, in seconds: the first save more than
            `keep_checkpoint_every_n_hours` after it is the next one kept permanently.
    """

    steps: frozenset[int]
    since: float


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        step: The global step of the state.
        saved_at: The time of the save, in seconds since 1970.
        leaves: The leaves of the state, in its order.
        extra: The user's values.
        retention: Which checkpoints are kept permanently; decided when the save ends.
        files: Path below the checkpoint → its size in bytes, and checksums or a stamp, depending on the store.
        jstep: The version that wrote it.
        data: The folder below the checkpoint that holds the files, if it was written to a bucket; None if it was
            written to a disk, where they are next to the manifest.
        left_out: Leaves of the state that were not saved; a target must provide them.
        finite: Whether all parameters are finite, or were not when the run began. Those of versions that did not record
            it count as finite.
        passing: Whether the next save replaces it, and it counts in no limit: what a run saved by itself, soon after a
            checkpoint that is kept.
    """

    step: int
    saved_at: float
    leaves: tuple[Leaf, ...]
    extra: Any = None
    retention: RetainedSteps = RetainedSteps(frozenset(), 0.0)
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # Not that of the installed package: another one, or none, may be installed under this name.
    jstep: str = dataclasses.field(default_factory=lambda: str(sys.modules["jstep"].__version__))
    data: str | None = None
    left_out: tuple[LeftOut, ...] = ()
    finite: bool = True
    passing: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether the arrays are packed into a few objects, as below a URL. A copy keeps the form of the original."""
        return self.data is not None

    @property
    def by_array(self) -> dict[str, Leaf]:
        """Name of a stored array → its leaf."""
        return {leaf.array: leaf for leaf in self.leaves if leaf.array is not None}


def encode(manifest: Manifest) -> bytes:
    """Encode the manifest as JSON, with a line for each leaf and file, and a final checksum of all lines before it."""
    head = {
        "format": FORMAT,
        "jstep": manifest.jstep,
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "bytes": sum(leaf.nbytes for leaf in manifest.leaves),
        "extra": manifest.extra,
        "retention": {"kept": sorted(manifest.retention.steps), "since": manifest.retention.since},
        "finite": manifest.finite,
    }
    head |= ({"passing": True} if manifest.passing else {}) | ({} if manifest.data is None else {"data": manifest.data})
    lines = [f' "{name}": {json.dumps(value)}' for name, value in head.items()]
    leaves = ",\n".join(f"  {json.dumps(leaf.to_json())}" for leaf in manifest.leaves)
    files = ",\n".join(f"  {json.dumps(path)}: {json.dumps(record)}" for path, record in manifest.files.items())
    lines += [f' "leaves": [\n{leaves}\n ]', f' "files": {{\n{files}\n }}']
    if manifest.left_out:
        left_out = ",\n".join(f"  {json.dumps(leaf.to_json())}" for leaf in manifest.left_out)
        lines.append(f' "left_out": [\n{left_out}\n ]')
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f'{_SEAL}{zlib.crc32(body):08x}"\n}}\n'.encode()


def decode(data: bytes) -> Manifest:
    """Decode the manifest that `encode` wrote.

    Raises:
        UnsupportedFormatError: It has a format that this version does not know.
        CheckpointError: It is corrupted or malicious.
    """
    body, seal, tail = data.rpartition(_SEAL.encode())
    if not seal or tail != f'{zlib.crc32(body):08x}"\n}}\n'.encode():
        raise CheckpointError("its checksum differs: the file was truncated or changed")
    try:
        loaded = json.loads(body + b"\n}")
        if loaded["format"] != FORMAT:
            raise UnsupportedFormatError(
                f"format {loaded['format']}, written by jstep {loaded['jstep']}, but this version reads format "
                f"{FORMAT}: read it with that version of jstep"
            )
        return _checked(loaded)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError(f"its checksum is correct, but its content is not what jstep writes ({reason})") from None


def _checked(loaded: Mapping[str, Any]) -> Manifest:
    """Check the type of every field: a checksum shows that nothing changed, not who wrote it."""
    retention, files = dict(loaded["retention"]), dict(loaded["files"])
    for path, record in files.items():
        parts = path.split("/")
        if path.startswith("/") or "\\" in path or "\0" in path or ".." in parts or "" in parts:
            _refuse(f"the file {path!r} is not below the checkpoint")
        _count(record["bytes"])
    data = loaded.get("data")
    if data is not None and (_text(data) in ("", ".", "..") or "/" in data):
        _refuse(f"the folder {data!r} is not below the checkpoint")
    return Manifest(
        _count(loaded["step"]),
        _number(loaded["saved_at"]),
        tuple(Leaf.from_json(leaf) for leaf in loaded["leaves"]),
        loaded["extra"],
        RetainedSteps(frozenset(map(_count, retention["kept"])), _number(retention["since"])),
        files,
        _text(loaded["jstep"]),
        data,
        tuple(LeftOut.from_json(leaf) for leaf in loaded.get("left_out", ())),
        _truth(loaded.get("finite", True)),
        _truth(loaded.get("passing", False)),
    )


def _refuse(why: str) -> Any:
    raise ValueError(why)


def _text(value: object) -> str:
    return value if isinstance(value, str) else _refuse(f"{value!r:.50} is not a string")


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)


def _truth(value: object) -> bool:
    return value if isinstance(value, bool) else _refuse(f"{value!r:.50} is neither true nor false")


def _count(value: Any) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if whole else _refuse(f"{value!r:.50} is not a count")


def _number(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if number else _refuse(f"{value!r:.50} is not a number")
