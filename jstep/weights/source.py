"""Opening of weights: safetensors files, or a checkpoint of Orbax or jstep."""

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jstep.checkpoint import CheckpointError
from jstep.checkpoint.format.manifest import NAME as MANIFEST
from jstep.checkpoint.store.listing import has_data
from jstep.weights import jstep_checkpoint
from jstep.weights.checkpoints import Checkpoint
from jstep.weights.find import INDEX, SUFFIX, find_weights, local
from jstep.weights.fit import Fit, Wanted, fit
from jstep.weights.header import Tensor
from jstep.weights.orbax_folder import folder_of
from jstep.weights.package import confirm
from jstep.weights.place import placed, read_whole


class Source(Protocol):
    """Weights that are open for reading.

    Attributes:
        path: The file, index or folder.
    """

    path: str

    def fit(self, target: Any, names: Any, float_dtype: Any) -> Fit:
        """Find the tensor of each leaf of a target; see `jstep.weights.fit.fit`."""

    def whole(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Read a whole tensor into new memory."""

    def leaves(self, wanted: Sequence[Wanted]) -> Iterator[Any]:
        """Read leaves that have no transform, in order: each device its own part."""


@contextlib.contextmanager
def open_source(path: Any) -> Iterator[Source]:
    """Open weights for reading, and check what describes them; no tensor is read.

    Raises:
        CheckpointError: A checkpoint of jstep is corrupted.
        FileNotFoundError: There are no weights at the path.
        ValueError: A file is corrupted, or a folder has several sets of weights.
    """
    checkpoint = _checkpoint(local(path))
    if checkpoint is not None:
        yield checkpoint
        return
    weights = find_weights(path)
    confirm(header.file for header in weights.files)
    with contextlib.ExitStack() as stack:
        yield _Files(weights.path, weights.tensors, stack)


def _checkpoint(path: str) -> Checkpoint | None:
    """Return the checkpoint at a path; None if safetensors files are to be looked for there."""
    if not os.path.isdir(path) or any(name.endswith((SUFFIX, SUFFIX + INDEX)) for name in os.listdir(path)):
        return None
    if os.path.lexists(os.path.join(path, MANIFEST)):
        try:
            return jstep_checkpoint.opened(path)
        except CheckpointError:
            if has_data(path):
                raise  # otherwise it is a file of another program
    folder = folder_of(path)
    if folder is None and has_data(path):
        raise ValueError(
            f"path={path!r}: is a checkpoint of jstep without {MANIFEST}: its save to a bucket was interrupted, or its "
            "copy was; in the latter case, copy it again"
        )
    if folder is None:
        return None
    from jstep.weights import orbax_checkpoint  # not at the top: importing Orbax is slow

    return orbax_checkpoint.opened(folder)


class _Files:
    """Safetensors files."""

    def __init__(self, path: str, tensors: Mapping[str, Tensor], stack: contextlib.ExitStack) -> None:
        self.path, self._tensors, self._stack = path, tensors, stack
        self._open: dict[str, io.RawIOBase] = {}

    def fit(self, target: Any, names: Any, float_dtype: Any) -> Fit:
        return fit(target, self._tensors, names, float_dtype)

    def whole(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        return read_whole(self._file(tensor), tensor)

    def leaves(self, wanted: Sequence[Wanted]) -> Iterator[Any]:
        for one in wanted:
            yield placed(one, self._file(one.tensor))

    def _file(self, tensor: Any) -> io.RawIOBase:
        if tensor.file not in self._open:
            file = open(tensor.file, "rb", buffering=0)  # noqa: SIM115
            self._open[tensor.file] = self._stack.enter_context(file)
        return self._open[tensor.file]
