"""Copies of arrays in the host's memory, so that a step on CPUs may reuse theirs during a save.

On CPUs, the writer could read the arrays of the state where they are. But XLA cannot reuse the
memory of an array to which something else refers, so the next step would allocate memory for a
second state, whose pages the kernel clears one by one: 400 ms for 256 MB, on a machine where a copy
takes 25 ms if its memory is kept between saves.
"""

import threading
import weakref
from collections.abc import Sequence

import numpy as np

from jstep.core.threads import map_in_tasks

_MIN_BYTES = 2**16
"""The minimum bytes of an array that is copied. The memory of a smaller one comes from what the
process has already."""
_ALIGNMENT = 64
"""The alignment of each copy in bytes, that of the processor's caches."""


class HostBlock:
    """A block of the host's memory, which is kept from one save to the next.

    The Savers of a process share one block (see `shared_block`). While one writes from it, another
    one gets new memory. It exists until the last Saver that has saved is closed or collected.
    """

    def __init__(self) -> None:
        # A save owns the memory from `borrow` to `give_back`, and `_memory` is None meanwhile. A
        # save that fails gives nothing back, because its writer may still read.
        self._memory: np.ndarray | None = None
        self._lock = threading.Lock()

    def borrow(self, nbytes: int) -> np.ndarray:
        """Return the memory, or new memory if it cannot be used.

        It cannot if another save has it, or if it is too small or more than twice as large.
        """
        with self._lock:
            memory = self._memory
            self._memory = None
        if memory is None or not nbytes <= memory.nbytes <= 2 * nbytes:
            memory = np.empty(nbytes, np.uint8)
        return memory

    def give_back(self, memory: np.ndarray) -> None:
        with self._lock:
            if self._memory is None or self._memory.nbytes < memory.nbytes:
                self._memory = memory


_current_block: "weakref.ref[HostBlock] | None" = None


def shared_block() -> HostBlock:
    """Return the block of this process, which exists as long as a Saver refers to it."""
    global _current_block
    block = None if _current_block is None else _current_block()
    if block is None:
        block = HostBlock()
        _current_block = weakref.ref(block)
    return block


class HostCopies:
    """The copies of the arrays of one save.

    Args:
        block: The block whose memory they take.
    """

    def __init__(self, block: HostBlock) -> None:
        self._block = block
        self._memory: np.ndarray | None = None

    def copy(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return copies of arrays; small ones are returned as they are."""
        offsets = []
        nbytes = 0
        for array in arrays:
            offsets.append(nbytes)
            if array.nbytes >= _MIN_BYTES:
                nbytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        results = list(arrays)
        if not nbytes:
            return results
        try:
            memory = self._block.borrow(nbytes)
        except MemoryError:
            return results
        self._memory = memory
        pairs = []
        for i, array in enumerate(arrays):
            if array.nbytes >= _MIN_BYTES:
                place = memory[offsets[i] : offsets[i] + array.nbytes]
                results[i] = place.view(array.dtype).reshape(array.shape)
                pairs.append((results[i], array))
        map_in_tasks(lambda pair: np.copyto(*pair), pairs, [array.nbytes for _, array in pairs])
        return results

    def release(self) -> None:
        """Give the memory back, once the copies have been written."""
        if self._memory is not None:
            self._block.give_back(self._memory)
            self._memory = None
