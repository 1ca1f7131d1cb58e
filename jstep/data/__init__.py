"""Data pipelines: batches by step, mixtures of sources, and prefetching to devices."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.data.batches import Batches, batches
from jstep.data.from_state import StateBatches, from_state
from jstep.data.mixture import Mixture, mixture
from jstep.data.prefetch import PrefetchIterator, prefetch_to_device
from jstep.data.replayed import ReplayedBatches, replayed
from jstep.data.sequence import BatchIterator, BatchSequence

__all__ = [
    "BatchIterator",
    "BatchSequence",
    "Batches",
    "Mixture",
    "PrefetchIterator",
    "ReplayedBatches",
    "StateBatches",
    "batches",
    "from_state",
    "mixture",
    "prefetch_to_device",
    "replayed",
]

_set_public_module(globals())
