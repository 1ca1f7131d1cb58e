"""The manifest of a checkpoint: a JSON description of its leaves and files.

Its last entry is a checksum of all that precedes it. It has no other checksums: those of the arrays
are in their database (`array_writer`).
"""

import dataclasses
import functools
import json
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.array_store.best_record import BestRecord
from jstep.core.checks import describe_type, format_list, format_value
from jstep.core.tables import printable
from jstep.stores.untrusted import (
    MAX_MANIFEST_BYTES,
    decode_json,
    is_seconds,
    is_step,
    is_utf8,
    is_word,
)

MANIFEST_FILE = "manifest.json"
FORMAT = 4
"""The number of the format of manifests. Formats 1 to 3 were written before the first release."""
DATABASE = 1
"""The number of the format of the database of arrays."""
TAGS_FORMAT = 1
"""The number of the format of tagged values, which `stores/tagged_json.py` writes: positions, and
states of hooks."""
_LARGEST = 2**58
"""A bound on the product of the axes of a shape, without those of size 0: below it, NumPy has
arrays of any dtype."""
_MAX_DIMENSIONS = 64
"""The maximum dimensions of an array of NumPy."""
_DEEPEST = 100
"""The maximum levels of nesting: Python parses JSON recursively, and the stack may be deep
already."""
MANIFEST_HEAD = b'{\n "format": '
"""The beginning of each manifest, of any format."""
_SEAL = ',\n "crc32": "'
"""What stands between the content of a manifest and the checksum of it."""


def jstep_version() -> str:
    """Return the version of jstep, as checkpoints record it."""
    # Not from the metadata of the installed package: another version, or none, may be installed
    # under this name.
    return str(sys.modules["jstep"].__version__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is corrupted."""


class CorruptedCheckpointError(CheckpointError):
    """A checkpoint is corrupted: its bytes are not those that were written.

    Attributes:
        problems: One description per corrupted file or object.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        super().__init__(problems)  # the argument, with which it is unpickled
        self.problems = [problems] if isinstance(problems, str) else list(problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class UnsupportedFormatError(CheckpointError):
    """A checkpoint is intact, but this version of jstep cannot read its format."""


class CheckpointExtra(NamedTuple):
    """The `extra` of a save, or a part of it.

    Attributes:
        values: JSON, which refers to the files by their names. A value of the dict may be a
            function that returns it, and that the first process calls in the background
            (`known_values`).
        files: Name → `ExternalBytes`: the files that this process writes. Names differ between
            processes.
        finite: Whether the checkpoint records its parameters as finite, if the caller has checked
            them. In a run, those that were not finite when it began count as finite.
        permanent_every_secs: Seconds from one permanent checkpoint to the next. One that is saved
            earlier is temporary: the next save replaces it, and no limit counts it. None if each is
            permanent.
        best: The evaluation for which a `KeepBest` saves it.
    """

    values: Any
    files: Mapping[str, Any]
    finite: bool | None = None
    permanent_every_secs: float | None = None
    best: BestRecord | None = None

    def is_same(self, other: "CheckpointExtra") -> bool:
        """Return whether both have the same files and values; no value may be a function."""
        text = json.dumps(self.values, sort_keys=True)
        other_text = json.dumps(other.values, sort_keys=True)
        return text == other_text and self.files == other.files


def as_checkpoint_extra(extra: object) -> CheckpointExtra:
    """Return the `extra` that a user saves with a state as a `CheckpointExtra`.

    A `CheckpointExtra` is returned as it is.

    Raises:
        TypeError: It is not JSON.
        ValueError: It is larger than a manifest that can be read.
    """
    if isinstance(extra, CheckpointExtra):
        return extra
    return CheckpointExtra(json_copy(extra, "extra"), {})


def known_values(values: Any) -> Any:
    """Return the `values` of a `CheckpointExtra`, after calling those that are functions."""
    if not isinstance(values, dict):
        return values
    return {key: value() if callable(value) else value for key, value in values.items()}


def json_copy(value: object, name: str) -> Any:
    """Convert as JSON does: tuples become lists."""
    _check_json(value, name)
    text = json.dumps(value)
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"{name}: must be at most {MAX_MANIFEST_BYTES} bytes of JSON, which a checkpoint's "
            f"manifest may have, got {len(text)}; put arrays into the state"
        )
    return json.loads(text)


def _check_json(value: object, name: str, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise TypeError(
            f"{name[:100]}…: contains itself, or is nested deeper than "
            f"{_DEEPEST} levels; flatten it"
        )
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{name}: the key {format_value(key)} must be a string, got "
                    f"{describe_type(key)}"
                )
            _check_json(item, f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(item, f"{name}[{i}]", depth + 1)
    elif not isinstance(value, str | int | float | None):
        raise TypeError(
            f"{name}: {describe_type(value)} is not a JSON value. extra takes dicts with string "
            "keys, lists, strings, numbers, booleans and None; put arrays into the state, or "
            "convert them with .tolist()"
        )


@dataclasses.dataclass(frozen=True)
class LeafRecord:
    """A leaf of a state in a manifest, saved or left out.

    Attributes:
        keys: The keys of the path, which may contain slashes themselves.
        dtype: Such as `bfloat16` or `key<fry>`.
    """

    path: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields without those that have their usual value.

        That is the path for `array`, the parts of the path for `keys`, and None for all others. So
        a None in `array` is written.
        """
        usual = {"array": self.path, "keys": tuple(self.path.split("/"))}
        fields: dict[str, Any] = {}
        for name, value in vars(self).items():
            if value != usual.get(name):
                fields[name] = list(value) if isinstance(value, tuple) else value
        return fields

    @staticmethod
    def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
        # A key of the user's, which UTF-8 may be unable to encode.
        path = _as_kind(data["path"], "a string")
        keys = tuple(_as_kind(key, "a string") for key in data.get("keys", path.split("/")))
        if not keys:
            raise ValueError("a leaf without keys")
        return {
            "path": path,
            "keys": keys,
            "shape": _as_shape(data["shape"]),
            "dtype": _as_kind(data["dtype"], "a dtype"),
        }


@dataclasses.dataclass(frozen=True)
class Leaf(LeafRecord):
    """A leaf that was saved.

    Attributes:
        nbytes: The bytes of its numbers; of a PRNG key, of its data.
        array: The name of the stored array; None if the leaf has no elements.
        stored_as: The dtype on disk, if it differs.
        key_impl: Set for a PRNG key, whose raw data is stored.
        half: The stored array with the other half of the numbers: scales or a remainder of
            `compact`.
    """

    nbytes: int
    array: str | None
    stored_as: str | None = None
    key_impl: str | None = None
    half: str | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Leaf":
        fields = cls._fields(data)
        path = fields["path"]
        shape = fields["shape"]
        dtype = fields["dtype"]
        array = _as_kind_or_none(data.get("array", path), "text")
        if array is None and (0 not in shape or is_too_large(shape)):
            raise ValueError(
                f"{path!r:.50} of shape {shape!s:.50} has elements, and they are not stored"
            )
        nbytes = _as_kind(data["nbytes"], "a count")
        stored_as = _as_kind_or_none(data.get("stored_as"), "a word")
        if stored_as is not None and stored_as != _carrier(dtype):
            raise ValueError(f"{path!r:.50} of dtype {dtype} is not stored as {stored_as}")
        return cls(
            **fields,
            nbytes=nbytes,
            array=array,
            stored_as=stored_as,
            key_impl=_as_kind_or_none(data.get("key_impl"), "a word"),
            half=_as_kind_or_none(data.get("half"), "text"),
        )


def is_too_large(shape: Sequence[int]) -> bool:
    """Return whether NumPy may have no array of a shape, even without elements."""
    return math.prod(filter(None, shape)) >= _LARGEST


def array_path(name: str) -> str:
    """Return the path at which an array is stored.

    Orbax joins keys with slashes, and the last one may be empty.
    """
    return name if name.endswith("/") else name + "/"


def _carrier(dtype: str) -> str | None:
    """Return the unsigned integer that may be stored instead of a dtype; None if there is none.

    It has the same width, but at least 8 bits: with another width, the view of an array would have
    another shape. `leaf_records` has the dtypes that are written in this way; all are read.
    """
    match = re.fullmatch(r"b?(?:float|int|uint)([0-9]{1,3})(?:_.*)?", dtype)
    if match is None:
        return None
    return f"uint{max(8, int(match[1]))}"


@dataclasses.dataclass(frozen=True)
class LeftOutLeaf(LeafRecord):
    """A leaf that `Saver(leave_out=…)` did not save, with its `jstep.fingerprint`."""

    fingerprint: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LeftOutLeaf":
        return cls(**cls._fields(data), fingerprint=_as_kind(data["fingerprint"], "text"))


def _keys_of(kind: type[LeafRecord]) -> frozenset[str]:
    return frozenset({field.name for field in dataclasses.fields(kind)} | {"notes"})


_LEAF_KEYS = _keys_of(Leaf)
"""The keys of the record of a leaf that was saved."""
_LEFT_OUT_KEYS = _keys_of(LeftOutLeaf)
"""The keys of the record of a leaf that was left out."""


@dataclasses.dataclass(frozen=True)
class RetainedSteps:
    """The retention state, which is written into every manifest.

    Attributes:
        kept: The steps of checkpoints that are kept for good, one every
            `keep_checkpoint_every_n_hours`.
        interval_start: The first save more than that many hours after this time is kept.
        temporary: The steps of checkpoints that the next save replaces.
    """

    kept: frozenset[int]
    interval_start: float
    temporary: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        retention: Decided when the save ends.
        files: Path below the checkpoint → its bytes; empty if it was written to a bucket.
        data: The directory with the files of a checkpoint written to a bucket; None if they are
            next to the manifest.
        parts: Name of an array → the shape of the parts in which it was written, unless that is its
            own.
        left_out: Leaves that a target must provide.
        finite: As in `CheckpointExtra`; True if it was not recorded.
        temporary: Whether the next save replaces it, and no limit counts it.
        processes: The number of processes that wrote it, each of them a database if there are
            several.
        best: As in `CheckpointExtra`.
        averages: The slots that the optimizer declares as averages of the parameters; None if the
            state was made by hand, or by a version that did not note them.
    """

    step: int
    saved_at: float
    leaves: tuple[Leaf, ...]
    extra: Any = None
    retention: RetainedSteps = RetainedSteps(frozenset(), 0.0)
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    jstep: str = dataclasses.field(default_factory=jstep_version)
    data: str | None = None
    parts: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    left_out: tuple[LeftOutLeaf, ...] = ()
    finite: bool = True
    temporary: bool = False
    processes: int = 1
    best: BestRecord | None = None
    averages: tuple[str, ...] | None = None

    @property
    def leaves_by_array(self) -> dict[str, Leaf]:
        return {leaf.array: leaf for leaf in self.leaves if leaf.array is not None}


def encode(manifest: Manifest) -> bytes:
    """Encode the manifest: a line for each leaf and file, then a checksum of all lines before it.

    Raises:
        CheckpointError: It is larger than what readers accept.
    """
    retention: dict[str, Any] = {
        "kept": sorted(manifest.retention.kept),
        "since": manifest.retention.interval_start,
    }
    if manifest.retention.temporary:
        retention["temporary"] = sorted(manifest.retention.temporary)
    fields: dict[str, Any] = {
        "format": FORMAT,
        "database": DATABASE,
        "tagged_values": TAGS_FORMAT,
        "jstep": manifest.jstep,
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "processes": manifest.processes,
        "extra": manifest.extra,
        "retention": retention,
        "finite": manifest.finite,
    }
    if manifest.temporary:
        fields["temporary"] = True
    if manifest.data is not None:
        fields["data"] = manifest.data
    if manifest.parts:
        fields["parts"] = manifest.parts
    notes: dict[str, Any] = {}
    if manifest.best is not None:
        fields["best"] = manifest.best.to_json()
        notes |= manifest.best.notes()
    if manifest.averages is not None:
        notes["averages"] = list(manifest.averages)
    if notes:
        fields["notes"] = notes
    lines = [f' "{name}": {json.dumps(value)}' for name, value in fields.items()]
    leaves = ",\n".join([f"  {json.dumps(leaf.to_json())}" for leaf in manifest.leaves])
    files = ",\n".join(
        [f"  {json.dumps(path)}: {json.dumps(record)}" for path, record in manifest.files.items()]
    )
    lines += [f' "leaves": [\n{leaves}\n ]', f' "files": {{\n{files}\n }}']
    if manifest.left_out:
        left_out = ",\n".join([f"  {json.dumps(leaf.to_json())}" for leaf in manifest.left_out])
        lines.append(f' "left_out": [\n{left_out}\n ]')
    body = ("{\n" + ",\n".join(lines)).encode()
    data = body + f'{_SEAL}{zlib.crc32(body):08x}"\n}}\n'.encode()
    if len(data) > MAX_MANIFEST_BYTES:
        # `json_copy` rejects most of these before anything is saved, but it does not see the
        # values that functions return at the end.
        raise CheckpointError(
            f"the manifest must have at most {MAX_MANIFEST_BYTES} bytes, got {len(data)}, of which "
            f"extra has {len(json.dumps(manifest.extra))}; put arrays into the state"
        )
    return data


# Listing, finding and reading a checkpoint decodes it three times in a row.
@functools.lru_cache(maxsize=4)
def decode(data: bytes) -> Manifest:
    """Decode a manifest, which callers must not modify.

    Raises:
        UnsupportedFormatError: It is of another format, or has what this version does not know.
        CorruptedCheckpointError: It is corrupted, or is not what jstep writes.
    """
    body, seal, tail = data.rpartition(_SEAL.encode())
    if not seal or tail != f'{zlib.crc32(body):08x}"\n}}\n'.encode():
        raise CorruptedCheckpointError("its checksum differs: the file was truncated or changed")
    try:
        loaded = decode_json(body + b"\n}")
        if loaded is None:
            raise ValueError("it is not JSON, or is nested too deeply")
        _check_format(loaded)
        return _as_manifest(loaded)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        reason = printable(f"{type(error).__name__}: {error}")[:200]
        problem = f"its checksum is correct, but its content is not what jstep writes ({reason})"
        raise CorruptedCheckpointError(problem) from None


def _check_format(loaded: Mapping[str, Any]) -> None:
    """Raise an `UnsupportedFormatError` unless this version reads all of a manifest's formats."""
    written_by = _as_kind(loaded.get("jstep", "an early version"), "a word")
    number = _as_kind(loaded["format"], "a count")
    if number < FORMAT:
        raise UnsupportedFormatError(
            f"it has format {number}, written by jstep {written_by} before the first release, "
            f"whose format is {FORMAT}. The checkpoint is intact: Orbax still reads its arrays, by "
            "orbax.checkpoint.PyTreeCheckpointer().restore(path), with names such as 'params/w'; "
            "or restore it with the version that wrote it, and write its arrays "
            "with jstep.save_weights"
        )
    if number != FORMAT:
        newer = f"format {format_value(number, 50)}"
    elif loaded["database"] != DATABASE:
        newer = f"a database of format {format_value(loaded['database'], 50)}"
    elif loaded["tagged_values"] != TAGS_FORMAT:
        newer = f"tagged values of format {format_value(loaded['tagged_values'], 50)}"
    else:
        newer = _unknown_keys(loaded)
    if newer:
        raise UnsupportedFormatError(
            f"it has {newer}, which this version ({jstep_version()}) does not know. The checkpoint "
            f"is intact, and was written by jstep {written_by}: install that or a later one"
        )


_MANIFEST_KEYS = frozenset(
    (
        "format", "database", "tagged_values", "jstep", "step", "saved_at", "processes", "extra",
        "retention", "finite", "temporary", "data", "parts", "leaves", "files", "left_out", "best",
        "notes",
    )
)  # fmt: skip
"""The keys of a manifest. A reader ignores whatever is below `notes`, here and in leaves, and
rejects other keys."""
_RETENTION_KEYS = frozenset({"kept", "since", "temporary", "notes"})


def _unknown_keys(loaded: Mapping[str, Any]) -> str:
    """Describe keys of a manifest that this version does not know; empty if it knows them all."""
    records = [
        ("the manifest", _MANIFEST_KEYS, [loaded]),
        ("its retention", _RETENTION_KEYS, [loaded["retention"]]),
        ("a leaf", _LEAF_KEYS, loaded["leaves"]),
        ("a leaf that was left out", _LEFT_OUT_KEYS, loaded.get("left_out", ())),
    ]
    for what, known, found in records:
        unknown = sorted({key for record in found for key in record.keys() - known})
        if unknown:
            return f"{format_list([format_value(key, 50) for key in unknown], 3)} in {what}"
    return ""


def _as_manifest(loaded: Mapping[str, Any]) -> Manifest:
    """Check the type of every field: a checksum shows that nothing changed, not who wrote it."""
    files = dict(loaded["files"])
    for path, nbytes in files.items():
        if not path.isprintable():
            raise ValueError(f"the file {path!r} has a name that jstep does not give")
        if "\\" in path or {"", ".."} & set(path.split("/")):
            raise ValueError(f"the file {path!r} is not below the checkpoint")
        _as_kind(nbytes, "a count")
    data = _as_kind_or_none(loaded.get("data"), "text")
    if data is not None and (data in ("", ".", "..") or "/" in data):
        raise ValueError(f"the directory {data!r} is not below the checkpoint")
    if data is not None and not data.isprintable():
        raise ValueError(f"the directory {data!r} has a name that jstep does not give")
    retention = loaded["retention"]
    parts = loaded.get("parts", {})
    leaves = tuple(Leaf.from_json(leaf) for leaf in loaded["leaves"])
    _check_distinct_arrays(leaves)
    return Manifest(
        step=_as_kind(loaded["step"], "a count"),
        saved_at=_as_kind(loaded["saved_at"], "a time"),
        leaves=leaves,
        extra=loaded["extra"],
        retention=RetainedSteps(
            kept=frozenset(_as_counts(retention["kept"])),
            interval_start=_as_kind(retention["since"], "a time"),
            temporary=frozenset(_as_counts(retention.get("temporary", ()))),
        ),
        files=files,
        jstep=_as_kind(loaded["jstep"], "a word"),
        data=data,
        parts={name: _as_shape(part) for name, part in parts.items()},
        left_out=tuple(LeftOutLeaf.from_json(leaf) for leaf in loaded.get("left_out", ())),
        finite=_as_kind(loaded.get("finite", True), "true or false"),
        temporary=_as_kind(loaded.get("temporary", False), "true or false"),
        processes=_as_kind(loaded["processes"], "a count"),
        best=BestRecord.from_json(loaded),
        averages=_averages_in(loaded.get("notes")),
    )


def _averages_in(notes: Any) -> tuple[str, ...] | None:
    # Notes are of any form, as readers may ignore them.
    averages = notes.get("averages") if isinstance(notes, dict) else None
    if not isinstance(averages, list) or not all(map(_is_string, averages)):
        return None
    return tuple(averages)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_utf8(value)


def _is_dtype(value: Any) -> bool:
    # NumPy evaluates parts of some other texts as Python, such as "(2,)f4".
    return is_word(value) and re.fullmatch(r"[a-z][a-z0-9_]*|key<[\w.-]+>", value) is not None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and is_seconds(value)  # not a bool, which is an int


_KINDS: dict[str, Callable[[Any], bool]] = {
    "a string": _is_string,
    "text": _is_text,
    "a word": is_word,
    "a dtype": _is_dtype,
    "true or false": _is_bool,
    "a count": is_step,
    "a time": _is_time,
}
"""Kinds of values in a manifest. Text is UTF-8, and may name a file; a word is printable, and an
error may show it."""


def _as_kind(value: Any, kind: str) -> Any:
    if not _KINDS[kind](value):
        raise ValueError(f"{value!r:.50} is not {kind}")
    return value


def _as_counts(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_as_kind(value, "a count") for value in values)


def _as_shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    # The product of very many sizes is a number whose computation takes quadratic time.
    if len(sizes) > _MAX_DIMENSIONS:
        raise ValueError(f"a shape of {len(sizes)} dimensions")
    return _as_counts(sizes)


def _check_distinct_arrays(leaves: Sequence[Leaf]) -> None:
    """Raise an error if leaves name one array: each of them, however many, would get a copy."""
    paths = Counter(array_path(leaf.array) for leaf in leaves if leaf.array is not None)
    path, count = next(iter(paths.most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{path!r:.50} is the array of {count} leaves")


def _as_kind_or_none(value: Any, kind: str) -> Any:
    return None if value is None else _as_kind(value, kind)
