"""What `train` was given."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from jstep.checkpoint import Saver


class Options(NamedTuple):
    """What `train` was given, but for the step, the state and the batches; see there."""

    last_step: int
    hooks: Sequence[Any]
    checkpoint_dir: str | os.PathLike[str] | Saver | None
    checkpoint_prefix: str
    save_checkpoint_secs: float | None
    save_checkpoint_steps: int | None
    logdir: str | os.PathLike[str] | None
    save_summaries_steps: int | None
    log_steps: int | None
    steps_per_call: int
    progress: bool | None
    batch_sharding: Any
    unroll: Any
