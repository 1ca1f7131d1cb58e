"""Where arrays lie on a mesh: specs, layouts, rows."""

from jstep.core.public import publish as _publish
from jstep.sharding.fsdp_specs import fsdp_specs
from jstep.sharding.shard_batch import shard_batch

__all__ = [
    "fsdp_specs",
    "shard_batch",
]

_publish(globals())
