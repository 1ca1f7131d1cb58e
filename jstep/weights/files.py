"""Files of weights, which are untrusted input: safetensors headers, indexes of shards, folders of Orbax."""

import functools
import json
import math
import ntpath
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jstep.checkpoint.listing import OF_ORBAX, TEMPORARY, listed
from jstep.checkpoint.manifest import NAME as MANIFEST
from jstep.core.checks import shown
from jstep.stores.objects import is_url, location

# Reading and validation of the header of a safetensors file, which is untrusted input, and its dtypes.
#
# A file is 8 bytes with the size of the header, the header in JSON, and the bytes of the tensors without gaps.

_DTYPES = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F4": (None, 4),
    "F6_E2M3": (None, 6),
    "F6_E3M2": (None, 6),
}
"""Code → name of the dtype, bits per element. Headers are read without importing JAX, which provides some dtypes.

The last ones are packed, several elements per byte: sizes can be checked, but JAX cannot hold them.
"""


def bits_of(code: str) -> int | None:
    """Return the bits per element; None for a dtype that safetensors does not have."""
    return _DTYPES[code][1] if code in _DTYPES else None


def name_of(code: str) -> str | None:
    """Return the name of the dtype; None if elements are smaller than a byte."""
    return _DTYPES[code][0] if code in _DTYPES else None


def dtype_of(code: str) -> np.dtype[Any] | None:
    """Return the NumPy dtype; None if elements are smaller than a byte."""
    return _dtypes().get(code)


def code_of(dtype: Any) -> str | None:
    """Return the safetensors code of a dtype; None if there is no equivalent (PRNG keys, int4, complex128)."""
    try:
        wanted = np.dtype(dtype).newbyteorder("=")
    except TypeError:
        return None
    return next((code for code, found in _dtypes().items() if found == wanted), None)


@functools.cache
def _dtypes() -> dict[str, np.dtype[Any]]:
    import jax.numpy as jnp

    return {code: np.dtype(jnp.dtype(name)) for code, (name, _) in _DTYPES.items() if name is not None}


METADATA = "__metadata__"
LARGEST = 100_000_000
"""Maximum bytes of a header; the `safetensors` package refuses larger ones, too."""
_LONGEST_AXIS = 2**63 - 1


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: Its name.
        code: The safetensors code of its dtype.
        shape: Its shape.
        file: The path of its file.
        start: The offset of its first byte in the file.
        nbytes: Its number of bytes.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The NumPy dtype; None if JAX cannot hold it."""
        return dtype_of(self.code)


class Array(NamedTuple):
    """An array in a checkpoint.

    Attributes:
        name: Its path in the checkpoint, such as `params/dense/kernel`.
        code: The name of its dtype, such as `key<fry>` for the data of PRNG keys.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its number of bytes."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


class Header(NamedTuple):
    """The content of a header.

    Attributes:
        file: The path of the file.
        tensors: The tensors by name, in the order of their bytes.
        metadata: The metadata strings.
    """

    file: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read_header(path: str) -> Header:
    """Read and check the header of a file.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        ValueError: It is not a safetensors file, is truncated, or its header contradicts itself; names the file.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        text = _text(file, path, size)
    entries = parsed(text, path)
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: {METADATA} in the header must map strings to strings, got {shown(metadata)}")
    data = 8 + len(text)
    tensors = sorted(
        (_tensor(name, entry, path, data) for name, entry in entries.items()), key=lambda one: (one.start, one.nbytes)
    )
    _check_gaps(tensors, path, data, size)
    return Header(path, {tensor.name: tensor for tensor in tensors}, metadata)


def parsed(text: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object in which no key occurs twice, at any depth.

    Raises:
        ValueError: It is not such an object; names the file.
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        what = "UTF-8" if isinstance(error, UnicodeError) else "JSON with unique keys"
        raise ValueError(f"{path}: corrupted: is not {what} ({type(error).__name__}: {error})"[:500]) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: corrupted: must be a JSON object, got {shown(found)}")
    return found


def _text(file: BinaryIO, path: str, size: int) -> bytes:
    first = file.read(8)
    if len(first) < 8:
        raise ValueError(f"{path}: is truncated or not a safetensors file: it has {size} bytes")
    length = int.from_bytes(first, "little")
    if length > LARGEST:
        raise ValueError(
            f"{path}: is not a safetensors file, or its header is malicious: its header size is {length} bytes, and "
            f"{LARGEST} are allowed"
        )
    if length > size - 8:
        raise ValueError(f"{path}: is truncated: its header has {length} bytes, but the file has {size}")
    text = file.read(length)
    if len(text) < length:
        raise ValueError(f"{path}: is truncated: its header has {length} bytes, but only {len(text)} could be read")
    if not text.startswith(b"{"):
        raise ValueError(f"{path}: is not a safetensors file: its header begins with {shown(text[:20])}")
    return text


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{shown(twice)} occurs twice, and readers may use either value")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _tensor(name: str, entry: Any, path: str, data: int) -> Tensor:
    where = f"{path}: corrupted: the tensor {shown(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{where} must have dtype, shape and data_offsets, got {shown(entry)}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = bits_of(code) if isinstance(code, str) else None
    if bits is None:
        raise ValueError(
            f"{where} has dtype {shown(code)}, which safetensors does not have: it has {', '.join(_DTYPES)}"
        )
    if not _are_counts(shape):
        raise ValueError(f"{where} has shape {shown(shape)}: must be a list of integers ≥ 0")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where} has data_offsets {shown(offsets)}: must be [begin, end] with 0 ≤ begin ≤ end")
    nbytes, needed = offsets[1] - offsets[0], math.prod(shape) * bits
    if nbytes * 8 != needed:
        raise ValueError(
            f"{where} has {nbytes} bytes by its data_offsets, and {shown(needed / 8 if needed % 8 else needed // 8)} "
            f"by its dtype {code} and shape {shown(shape)}"
        )
    return Tensor(name, code, tuple(shape), path, data + offsets[0], nbytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x <= _LONGEST_AXIS for x in value)


def _check_gaps(tensors: Sequence[Tensor], path: str, data: int, size: int) -> None:
    at, before = data, "the header"
    for tensor in tensors:
        if tensor.start != at:
            what = "overlaps with" if tensor.start < at else f"begins {tensor.start - at} bytes behind"
            raise ValueError(f"{path}: corrupted: the tensor {shown(tensor.name)} {what} {before}")
        at, before = tensor.start + tensor.nbytes, f"the tensor {shown(tensor.name)}"
    if at > size:
        raise ValueError(f"{path}: is truncated: it has {size} bytes, but its tensors need {at}")
    if at < size:
        raise ValueError(f"{path}: corrupted: {size - at} bytes at its end belong to no tensor")


def confirm(paths: Iterable[str]) -> None:
    """Open files with the package, which reads only their headers.

    Raises:
        ImportError: The package is not installed.
        ValueError: The package refuses a file.
    """
    safetensors = package()
    for path in paths:
        try:
            with safetensors.safe_open(path, framework="numpy"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path}: the safetensors package {safetensors.__version__} refuses it: {error}; a newer version may "
                "know its dtypes: pip install -U safetensors"
            ) from None


def package() -> Any:
    """Import the package.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("weights need the safetensors package: pip install 'jstep[weights]'") from error
    return safetensors


# Finding of the files that hold the weights: a file, a folder, or an index with its shards.

SUFFIX = ".safetensors"
INDEX = ".index.json"
_DEFAULTS = (f"model{SUFFIX}", f"model{SUFFIX}{INDEX}")
"""The names that `transformers` writes, and looks for in a folder."""


class Weights(NamedTuple):
    """The combined content of all headers.

    Attributes:
        path: The file, or the index.
        files: The headers of all files.
        tensors: All tensors, by name.
        metadata: The metadata strings of all files.
    """

    path: str
    files: tuple[Header, ...]
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def local(path: Any, name: str = "path") -> str:
    """Return a local path.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty, or a URL.
    """
    if path == "":
        raise ValueError(f"{name}='': must name a file or a folder")
    found = location(path, name)
    if is_url(found):
        raise ValueError(f"{name}={found!r}: must be a local path; copy the files to this machine first")
    return found


def find_weights(path: Any) -> Weights:
    """Find the files, and read and check all headers; no tensor is read.

    Args:
        path: A safetensors file, an index, or a folder.

    Raises:
        FileNotFoundError: The path does not exist, the folder has no weights, or an index names a missing file.
        ValueError: A file is corrupted, the index contradicts the files, or a folder has several sets of weights.
    """
    path = local(path)
    if os.path.isdir(path):
        path = os.path.join(path, _chosen(path))
    elif os.path.isfile(path + INDEX) and not os.path.exists(path):
        path += INDEX
    elif not os.path.exists(path):
        raise FileNotFoundError(
            f"path={path!r}: there is no such file or folder; huggingface_hub.snapshot_download downloads a "
            "repository of the Hub, and returns the path of its folder"
        )
    if _is_index(path):
        return _sharded(path)
    header = read_header(path)
    return Weights(path, (header,), header.tensors, header.metadata)


def _chosen(folder: str) -> str:
    """Return the name of the file or index in a folder."""
    # Hidden files are ignored, as by globs: macOS leaves "._model.safetensors" next to copied files.
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    found = [name for name in names if name in _DEFAULTS]
    if not found:
        indexes = [name for name in names if name.endswith(SUFFIX + INDEX)]
        shards = {shard for name in indexes for shard in _files_of(os.path.join(folder, name)).values()}
        found = indexes + [name for name in names if name.endswith(SUFFIX) and name not in shards]
    if not found:
        raise FileNotFoundError(
            f"path={folder!r}: the folder has no weights (*{SUFFIX}, *{SUFFIX}{INDEX}), and is not a "
            "checkpoint of Orbax or jstep"
        )
    if len(found) > 1:
        listed = ", ".join(map(repr, found[:_SHOWN]))
        raise ValueError(f"path={folder!r}: the folder has several sets of weights ({listed}); pass the path of one")
    return found[0]


def _is_index(path: str) -> bool:
    """Return whether a file is JSON: as the size of a safetensors header, its first bytes would be far too large."""
    with open(path, "rb") as file:
        first = file.read(8)
    if int.from_bytes(first, "little") <= LARGEST and len(first) == 8:
        return False
    return first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") or path.endswith(INDEX)


def _sharded(path: str) -> Weights:
    weight_map = _files_of(path)
    if not weight_map:
        raise ValueError(f"{path}: the index lists no tensor")
    headers = {}
    for name in sorted(set(weight_map.values())):
        file = os.path.join(os.path.dirname(path), name)
        if not os.path.isfile(file):
            raise FileNotFoundError(f"{path}: the index names {name!r}, but there is no such file")
        headers[name] = read_header(file)
    tensors: dict[str, Tensor] = {}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ValueError(f"{path}: the tensor {name!r} is in two files, {tensors[name].file} and {tensor.file}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            raise ValueError(f"{path}: the tensor {name!r} should be in {file!r}, which does not have it")
    metadata = {key: text for header in headers.values() for key, text in header.metadata.items()}
    return Weights(path, tuple(headers.values()), tensors, metadata)


def _files_of(path: str) -> dict[str, str]:
    """Return the file names in an index, by tensor."""
    with open(path, "rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"{path}: the index is too large: {LARGEST} bytes are allowed")
    weight_map = parsed(text, path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{path}: not an index: must have a weight_map from tensors to files, got {shown(weight_map)}")
    for file in set(weight_map.values()):
        # Check the name, not the link target: snapshots of the Hub are links to files elsewhere.
        parts = file.replace("\\", "/").split("/")
        if "" in parts or ".." in parts or "\0" in file or ntpath.splitdrive(file)[0]:
            raise ValueError(
                f"{path}: the index names the file {shown(file)}: must be a name inside the index's folder"
            )
    return weight_map


# Finding of the arrays of an Orbax checkpoint among its files, without importing Orbax.

_METADATA = "_METADATA"
_ARRAYS = "manifest.ocdbt"
_DEFAULT = "default"  # the item of a CheckpointManager that was given only one
_STEP = re.compile(r"(?:.*[_-])?[0-9]+")
_SHOWN = 10  # folders listed in a message


def folder_of(path: str) -> str | None:
    """Return the folder with the arrays of a checkpoint: the folder itself, or an item of a CheckpointManager's step.

    Args:
        path: The path of a folder.

    Returns:
        The folder; None if Orbax did not write any.

    Raises:
        ValueError: The checkpoint is incomplete, or the folder has several checkpoints or items.
    """
    if TEMPORARY in os.path.basename(os.path.abspath(path)):
        raise ValueError(
            f"path={path!r}: this checkpoint of Orbax is incomplete: its save was interrupted, or still runs"
        )
    entries = set(listed(path))
    if _METADATA in entries:
        return _with_arrays(path)
    folders = sorted(name for name in entries if os.path.isdir(os.path.join(path, name)))
    if _ARRAYS in entries:
        raise _without_metadata(path)
    checkpoints = sorted(
        (name for name in folders if _STEP.fullmatch(name) and _is_checkpoint(os.path.join(path, name))),
        key=lambda name: int(re.split("[_-]", name)[-1]),
    )
    if checkpoints:
        raise _several(path, "is a directory of checkpoints", checkpoints[::-1])
    items = [name for name in folders if _METADATA in listed(os.path.join(path, name)) and TEMPORARY not in name]
    if _DEFAULT in items or len(items) == 1:
        return _with_arrays(os.path.join(path, _DEFAULT if _DEFAULT in items else items[0]))
    if items:
        raise _several(path, "has several items or checkpoints", items)
    unfinished = [name for name in folders if TEMPORARY in name]
    if unfinished:
        raise ValueError(
            f"path={path!r}: has only {unfinished[0]}, an incomplete checkpoint of Orbax: its save was interrupted, or "
            "still runs"
        )
    if entries & OF_ORBAX:
        raise _without_metadata(path)
    return None


def _several(folder: str, what: str, names: Sequence[str]) -> ValueError:
    first, such_as = ", ".join(names[:_SHOWN]), os.path.join(folder, names[0])
    return ValueError(f"path={folder!r}: {what} ({first}); pass the path of one, such as {such_as!r}")


def _with_arrays(folder: str) -> str:
    """Return the folder if the file that lists its arrays exists: without it, Orbax prints errors of its threads."""
    with open(os.path.join(folder, _METADATA), "rb") as file:
        try:
            metadata = json.load(file)
        except ValueError:
            return folder  # for Orbax to describe
    if isinstance(metadata, dict) and metadata.get("use_ocdbt") and _ARRAYS not in listed(folder):
        raise ValueError(f"{folder}: a checkpoint of Orbax without {_ARRAYS}: its copy is incomplete; copy it again")
    return folder


def _without_metadata(path: str) -> ValueError:
    return ValueError(
        f"path={path!r}: a checkpoint of Orbax without {_METADATA}: its copy is incomplete, or an old version wrote "
        "it; in the latter case, restore it with Orbax and save it again with ocp.StandardCheckpointer"
    )


def _is_checkpoint(path: str) -> bool:
    """Return whether a folder is a checkpoint of Orbax or jstep."""
    entries = set(listed(path))
    return bool(entries & {MANIFEST, *OF_ORBAX}) or any(_METADATA in listed(os.path.join(path, one)) for one in entries)
