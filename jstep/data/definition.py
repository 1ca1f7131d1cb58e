"""The definition of a batch sequence as JSON, for the records of runs and of their checkpoints."""

import hashlib
from typing import Any

import numpy as np

from jstep.data._steps import NO_END
from jstep.data.mixture import Mixture
from jstep.data.sequence import BatchSequence


def weights_of(batches: BatchSequence) -> dict[int, dict[str, float]]:
    """Return the weights of a mixture's sources by the step from which they hold; empty for other batches.

    Example:
        >>> import numpy as np, jstep
        >>> from jstep.data.definition import weights_of
        >>> weights = {0: {"a": 3, "b": 1}, 10: {"a": 1, "b": 1}}
        >>> mix = jstep.mixture({"a": np.arange(9), "b": np.arange(9)}, 4, weights)
        >>> weights_of(mix.skip(2, 5))
        {0: {'a': 0.75, 'b': 0.25}, 7: {'a': 0.5, 'b': 0.5}}
    """
    if not isinstance(batches, Mixture):
        return {}
    found = batches._steps.changes(batches._plan.weights.stages())
    return {step: dict(zip(sorted(batches._rows), map(float, of), strict=True)) for step, of in found.items()}


def definition_of(batches: BatchSequence) -> dict[str, Any]:
    """Return everything that determines the batches except the values of their rows, as JSON-serializable values.

    The result does not depend on the number of processes. Batch sizes and weights are by the step from which they hold.

    Example:
        >>> import numpy as np, jstep
        >>> from jstep.data.definition import definition_of
        >>> data = jstep.batches(np.arange(100), batch_size=4, seed=1).skip(10, 12)
        >>> found = definition_of(data)
        >>> found["rows"], found["batch_size"], found["seed"], found["steps"]
        (100, {'0': 4}, 1, [[0, 10, 1], [12, None, 1]])
    """
    size, weights = batches.batch_size, weights_of(batches)
    return {
        "kind": type(batches).__name__,
        "batch_size": {str(step): rows for step, rows in (size if isinstance(size, dict) else {0: size}).items()},
        **({"weights": {str(step): of for step, of in weights.items()}} if weights else {}),
        **batches._definition(),
        "steps": [[part.start, None if part.stop >= NO_END else part.stop, part.step] for part in batches._steps.parts],
    }


def rows_hash(batches: BatchSequence) -> str:
    """Hash which rows the batches of a sequence with an end take, independent of the number of processes.

    The hash covers the number of rows of each source, and the row numbers of five batches, the first and the last among
    them: the rows of a batch depend on how many rows the batches before it took.

    Example:
        >>> import numpy as np, jstep
        >>> from jstep.data.definition import rows_hash
        >>> one, grown = (jstep.batches(np.arange(100), size, seed=1) for size in (4, {0: 4, 30: 8}))
        >>> rows_hash(one[:30]) == rows_hash(grown[:30]), rows_hash(one[:31]) == rows_hash(grown[:31])
        (True, False)
    """
    count, names, hashed = len(batches), sorted(batches._rows), hashlib.blake2b(digest_size=16)
    before = batches.rows_before(count)
    used = {name: rows for name, rows in (before if isinstance(before, dict) else {"": before}).items() if rows}
    hashed.update(repr((count, sorted(used.items()))).encode())
    for step in sorted({*(count * i // 4 for i in range(4)), count - 1}) if count else ():
        for of in batches._rows_of(batches._steps[step]):
            hashed.update(repr(names[of.source]).encode())
            for numbers in (of.indices, of.rows):
                each = np.arange(numbers.start, numbers.stop) if isinstance(numbers, slice) else numbers
                hashed.update(each.astype("<i8").tobytes())
    return hashed.hexdigest()
