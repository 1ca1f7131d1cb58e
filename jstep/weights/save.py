"""`save_weights`: safetensors files, written under temporary names, then renamed together."""

import collections
import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from jstep.array_store.leaf_records import check_saveable
from jstep.core import device_values, meshes, placement, processes, trees
from jstep.core.checks import as_int, as_mapping, describe_type, format_value
from jstep.core.processes import share_errors
from jstep.core.trees import Tree
from jstep.stores.files import keep_mode, make_directories, new_file, sync_directory
from jstep.stores.owners import new_token, remove_temporary, temporary_path
from jstep.stores.untrusted import is_utf8
from jstep.weights.matching_tensors import (
    Names,
    Transform,
    call_transform,
    rules,
    transform_of_ones,
)
from jstep.weights.search import INDEX, local_path
from jstep.weights.tensors import (
    LARGEST,
    METADATA,
    Tensor,
    check_file,
    dtype_code,
    group_by_bytes,
    package,
)

# Atomic writing of safetensors files: to temporary names first, then all renamed together.


class _Item(NamedTuple):
    path: str
    leaf: Any
    transform: Transform | None
    tensor: Tensor


def _header(items: Sequence[_Item], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for item in items:
        tensor = item.tensor
        end = start + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.code,
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # align the tensors
    if len(text) > LARGEST:
        raise ValueError(
            f"the header would have {len(text)} bytes, and {LARGEST} are allowed; "
            "shorten the metadata"
        )
    return len(text).to_bytes(8, "little") + text


class NewFiles:
    """The files of one save, which are written under temporary names and then published.

    Attributes:
        names: The names of the files with tensors: several, if there is an index.
        path: What readers open: the file, or the index.
    """

    def __init__(self, path: str, shards: int) -> None:
        self._directory, self._base = os.path.split(path)
        self._stem, self._suffix = os.path.splitext(self._base)
        self._index = self._base + INDEX
        self._token = new_token()
        self.names = [self._base]
        self.path = path
        if shards > 1:
            self.names = [
                f"{self._stem}-{i + 1:05d}-of-{shards:05d}{self._suffix}" for i in range(shards)
            ]
            self.path = path + INDEX

    @property
    def _has_index(self) -> bool:
        return len(self.names) > 1

    @property
    def _all_names(self) -> list[str]:
        return [*self.names, self._index] if self._has_index else self.names

    def check(self) -> None:
        for file in map(self._final, self._all_names):
            if os.path.lexists(file) and not stat.S_ISREG(os.lstat(file).st_mode):
                raise OSError(
                    errno.EINVAL, "is not a regular file, and would be replaced; move it away", file
                )

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        make_directories(self._directory)
        with new_file(self._temporary(name)) as file:
            keep_mode(file.name, self._final(name))
            yield file

    def publish(self, shard_of: Mapping[str, int], total_size: int) -> None:
        """Rename the files, and remove the files of an older save.

        Readers that follow the index find all of the older save or all of this one, even meanwhile
        or after a crash: each change that a later one relies on is flushed to disk first.
        """
        for name in self.names:
            check_file(self._temporary(name))
        older = [name for name in os.listdir(self._directory or ".") if self._is_own(name)]
        first_names = self.names
        # If the older index refers to shards of the same names, the new ones first get interim
        # names.
        has_clash = self._has_index and not set(older).isdisjoint(self.names)
        if has_clash:
            interim = f".{self._token[-8:]}{self._suffix}"
            first_names = [name.removesuffix(self._suffix) + interim for name in self.names]
        self._move_to_names(first_names, older, shard_of, total_size)
        if has_clash:
            self._rename_from_interim(first_names, shard_of, total_size)
        stale = {*older, *first_names} - set(self._all_names)
        # The index first: without its shards, it would be broken.
        if self._index in stale:
            self._remove(self._index)
            sync_directory(self._directory)
        for name in sorted(stale - {self._index}):
            self._remove(name)
        remove_temporary(self._directory, self._is_own)

    def _move_to_names(
        self,
        names: Sequence[str],
        older: Sequence[str],
        shard_of: Mapping[str, int],
        total_size: int,
    ) -> None:
        """Give the files these names, and then switch the index to them: the new weights exist."""
        opened_by_readers = self._index if self._has_index else self._base
        is_new = opened_by_readers not in older
        is_switched = False
        moved: list[tuple[str, str]] = []
        try:
            for name, new_name in zip(self.names, names, strict=True):
                moved.append((self._temporary(name), self._final(new_name)))
                os.replace(*moved[-1])
            if self._has_index:
                self._switch_index(names, shard_of, total_size)
            is_switched = True
            sync_directory(self._directory)
        except BaseException:
            # A file or an index that replaced an older one stays, complete. Otherwise only the
            # older weights stay.
            if is_new:
                self._remove(opened_by_readers)
            if self._has_index and (is_new or not is_switched):
                for temporary, final in moved:
                    with contextlib.suppress(OSError):
                        os.replace(final, temporary)
            raise

    def _rename_from_interim(
        self, interim_names: Sequence[str], shard_of: Mapping[str, int], total_size: int
    ) -> None:
        """Give the shards their own names; they have both until the index refers to these."""
        for name, interim_name in zip(self.names, interim_names, strict=True):
            try:
                os.link(self._final(interim_name), self._temporary(name))
            except OSError:  # a file system without links
                shutil.copyfile(self._final(interim_name), self._temporary(name))
            os.replace(self._temporary(name), self._final(name))
        self._switch_index(self.names, shard_of, total_size)
        sync_directory(self._directory)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._final(name))

    def _switch_index(
        self, names: Sequence[str], shard_of: Mapping[str, int], total_size: int
    ) -> None:
        weight_map = {name: names[number] for name, number in sorted(shard_of.items())}
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        with self.writing(self._index) as file:
            file.write(json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")
        sync_directory(self._directory)
        os.replace(self._temporary(self._index), self._final(self._index))

    def discard(self) -> None:
        for name in [*self.names, self._index]:
            with contextlib.suppress(OSError):
                os.remove(self._temporary(name))

    def _is_own(self, name: str) -> bool:
        if name in (self._base, self._index):
            return True
        stem = re.escape(self._stem)
        suffix = re.escape(self._suffix)
        shard = rf"{stem}-\d{{5}}-of-\d{{5}}(\.[0-9a-f]{{8}})?{suffix}"
        return re.fullmatch(shard, name) is not None

    def _final(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _temporary(self, name: str) -> str:
        return temporary_path(self._final(name), self._token)


# `save_weights`: saving as safetensors files.


def save_weights(
    path: str | os.PathLike[str],
    params: Tree,
    names: Names | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> str:
    """Save weights as safetensors files, for `transformers`, vLLM and other tools that read them.

    Saving is atomic: readers find the older weights until all files are written. On several
    processes all of them call it and the first one writes.

    Args:
        path: A file, such as `model.safetensors`. Larger weights are written to
            `model-00001-of-00003.safetensors` and so on, with `model.safetensors.index.json`. A
            file that is replaced keeps its mode, and a link is followed.
        params: A tree of arrays, on any devices, with any sharding.
        names: Path in params → the name of its tensor, None to omit the leaf, or a pair
            `(name, transform)`, where `transform` computes the tensor from the leaf, a NumPy array
            (`numpy.transpose`). A mapping, in which missing paths are the names, or a function of
            the path.
        metadata: Strings to store with the tensors; `{"format": "pt"}` if None, which
            `transformers` needs.
        max_shard_bytes: The maximum size of the tensors in one file. A larger tensor has its own
            file.

    Returns:
        The path of the file, or of the index.

    Raises:
        ImportError: The `safetensors` package is not installed: `pip install 'jstep[weights]'`.
        OSError: The files cannot be written. Older files are unchanged.
        TypeError: A leaf is not an array, or an argument is of the wrong type.
        ValueError: Two leaves have one name; a leaf has a dtype that safetensors lacks (PRNG keys,
            int4) or was deleted; or names has a path that is not in params.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, jstep
        >>> params = {"up": jnp.ones((64, 64))}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = jstep.save_weights(f"{directory}/model.safetensors", params)
        ...     os.listdir(directory)
        ['model.safetensors']

    Source: https://huggingface.co/docs/safetensors
    """
    package()
    path = _file(path)
    metadata = _metadata(metadata)
    limit = as_int(max_shard_bytes, "max_shard_bytes", 1)
    placement.check_no_shapes(params, "params")
    items = _items(params, names)
    # Shards are filled in tree order, then sorted so that large elements are aligned.
    groups = group_by_bytes(((item.tensor.name, item.tensor.nbytes, item) for item in items), limit)
    shards = [sorted(group.values(), key=lambda item: -item.tensor.itemsize) for group in groups]
    file = path
    if len(shards) == 1 and os.path.islink(path):
        # A link to a file is followed. Several shards are written beside it, and their index
        # replaces it.
        file = os.path.realpath(path)
    files = NewFiles(file, len(shards))
    # Gathering is a collective: all processes take part to the end, even if the first one fails.
    arrays = (_host(item.leaf) for shard in shards for item in shard)

    def write() -> None:
        try:
            if processes.is_process_0():
                _write(files, shards, arrays, metadata)
        finally:
            if jax.process_count() > 1:
                collections.deque(arrays, maxlen=0)

    share_errors(write, f"path={path!r}: process 0 could not save the weights")
    return files.path if len(shards) > 1 else path


def _write(
    files: NewFiles,
    shards: Sequence[Sequence[_Item]],
    arrays: Iterator[Any],
    metadata: dict[str, str],
) -> None:
    files.check()
    try:
        for name, shard in zip(files.names, shards, strict=True):
            with files.writing(name) as file:
                file.write(_header(shard, metadata))
                for item in shard:
                    file.write(_stored(item, next(arrays)).reshape(-1).view(np.uint8).data)
        shard_of: dict[str, int] = {}
        total_size = 0
        for number, shard in enumerate(shards):
            for item in shard:
                shard_of[item.tensor.name] = number
                total_size += item.tensor.nbytes
        files.publish(shard_of, total_size)
    finally:
        files.discard()


def _items(params: Tree, names: object) -> list[_Item]:
    items: list[_Item] = []
    problems: list[str] = []
    owners: dict[str, str] = {}
    for (path, leaf), rule in zip(
        trees.leaves_with_paths(params), rules(names, params, "params"), strict=True
    ):
        leaf = _as_saved(leaf, path)
        if rule.name is None:
            continue
        stored = leaf
        if rule.transform is not None and not trees.is_key(leaf):
            stored = transform_of_ones(rule.transform, leaf.shape, leaf.dtype, path)
        code = dtype_code(stored.dtype)
        if rule.name in owners:
            problems.append(f"{owners[rule.name]!r} and {path!r} have one name, {rule.name!r}")
        elif rule.name in ("", METADATA) or not is_utf8(rule.name):
            problems.append(
                f"{path!r} has the name {rule.name!r}, which safetensors does not allow"
            )
        elif code is None:
            problems.append(f"{path!r} is {stored.dtype}")
        else:
            tensor = Tensor(rule.name, code, tuple(stored.shape), np.dtype(stored.dtype))
            items.append(_Item(path, leaf, rule.transform, tensor))
        owners.setdefault(rule.name, path)
    if problems:
        raise ValueError(
            f"params: cannot be saved: {'; '.join(problems)}; give them another name or "
            "transform in names, or None"
        )
    if not items:
        raise ValueError("params: has no leaf to save")
    return items


def _stored(item: _Item, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if item.transform is not None:
        array = call_transform(item.transform, array, item.path)
    code = item.tensor.code
    shape = item.tensor.shape
    if (dtype_code(array.dtype), array.shape) != (code, shape):
        raise ValueError(
            f"names: the transform for {item.path!r} returned {array.dtype}{list(array.shape)} for "
            f"the leaf, but {code}{list(shape)} for ones of its shape; it must depend on "
            "shape and dtype alone"
        )
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def _host(leaf: object) -> np.ndarray[Any, Any]:
    with meshes.internal_transfers():
        if not isinstance(leaf, jax.Array):
            return np.asarray(leaf)
        if leaf.is_fully_replicated:
            return np.asarray(leaf.addressable_data(0))
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def _as_saved(leaf: object, path: str) -> Any:
    what = f"params: {trees.quote_path(path)}"
    check_saveable(leaf, what)
    if trees.is_python_number(leaf):
        return device_values.number(leaf, what)
    if not trees.is_array(leaf):
        raise TypeError(
            f"{what} must be an array, got {describe_type(leaf)}; remove others, as by "
            "equinox.filter or flax.nnx.state"
        )
    return leaf


def _file(path: object) -> str:
    file = local_path(path)
    if os.path.isdir(file) or not os.path.basename(file):
        raise IsADirectoryError(
            f"path={file!r}: must be a file, got a directory; pass "
            f"{os.path.join(file, 'model.safetensors')!r}"
        )
    if file.endswith(INDEX):
        raise ValueError(
            f"path={file!r}: must be a file for tensors, got an index; pass "
            f"{file.removesuffix(INDEX)!r}"
        )
    return file


def _metadata(metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {"format": "pt"}  # `transformers` rejects a file without it
    for key, value in as_mapping(metadata, "metadata", "from strings to strings").items():
        if not all(isinstance(text, str) and is_utf8(text) for text in (key, value)):
            raise TypeError(
                f"metadata: {format_value(key)}: {format_value(value)} must be strings in "
                "UTF-8; use json.dumps"
            )
    return dict(metadata)
