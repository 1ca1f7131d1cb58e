"""Comparison by fingerprints of the leaves that `Saver(leave_out=…)` left out of checkpoints."""

from collections.abc import Iterator

from jstep.checkpoint.format.manifest import LeftOut
from jstep.cli.checkpoints import Checkpoint, names_of
from jstep.cli.compare import LeafDifference


def absent_from(one: Checkpoint) -> dict[str, LeftOut]:
    """Return the records of the leaves that were left out, by path."""
    return {leaf.path: leaf for leaf in one.manifest.left_out}


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[LeafDifference]:
    """Yield the differences of leaves that were left out of one or both checkpoints, including those in only one."""
    of_a, of_b = absent_from(a), absent_from(b)
    records_a, records_b = of_a | _saved(a, set(of_b)), of_b | _saved(b, set(of_a))
    for path in (*of_a, *(path for path in of_b if path not in of_a)):
        one, other = records_a.get(path), records_b.get(path)
        where = f"left out of {'both' if path in of_a and path in of_b else 'A' if path in of_a else 'B'}"
        if one is None or other is None:
            only = "only in A" if other is None else "only in B"
            yield LeafDifference(path, only, f"{only}, {where}")
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            kinds = f"{one.dtype}{list(one.shape)} in A, {other.dtype}{list(other.shape)} in B"
            yield LeafDifference(path, "shape" if one.dtype == other.dtype else "dtype", f"{kinds}, {where}")
        elif one.fingerprint != other.fingerprint:
            yield LeafDifference(path, "values", f"the fingerprint, {where}")


def _saved(one: Checkpoint, paths: set[str]) -> dict[str, LeftOut]:
    """Return the records that saved leaves would have if they had been left out."""
    if not paths & set(names_of(one)):
        return {}
    from jstep.checkpoint.format.left_out import started  # imports JAX, which is not needed above

    pairs = zip(names_of(one), one.leaves(), strict=True)
    return {name: started([(leaf, array)])()[0] for name, (leaf, array) in pairs if name in paths}
