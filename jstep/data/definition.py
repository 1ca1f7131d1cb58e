"""The definition of a batch sequence as JSON, for the records of runs."""

from typing import Any

from jstep.data._steps import NO_END
from jstep.data.sequence import BatchSequence


def definition_of(batches: BatchSequence) -> dict[str, Any]:
    """Return everything that determines the batches except the values of their rows, as JSON-serializable values.

    The result does not depend on the number of processes.

    Example:
        >>> import numpy as np, jstep
        >>> from jstep.data.definition import definition_of
        >>> data = jstep.batches(np.arange(100), batch_size=4, seed=1).skip(10, 12)
        >>> found = definition_of(data)
        >>> found["rows"], found["batch_size"], found["seed"], found["steps"]
        (100, {'0': 4}, 1, [[0, 10, 1], [12, None, 1]])
    """
    parts = [[part.start, None if part.stop >= NO_END else part.stop, part.step] for part in batches._steps.parts]
    return {"kind": type(batches).__name__, **batches._definition(), "steps": parts}
