"""Shardings of states and batches over a mesh."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.sharding.batches import shard_batch
from jstep.sharding.fsdp_specs import fsdp_specs

__all__ = [
    "fsdp_specs",
    "shard_batch",
]

_set_public_module(globals())
