"""What earlier starts' records know of a run's origin, beyond what its checkpoint says."""

import contextlib
import os
from collections.abc import Sequence

from jstep.checkpoint.names import checkpoint_name
from jstep.core.logs import logger
from jstep.hooks.origin import Kind, Lineage, Origin
from jstep.hooks.run_extra import PARENT, PARENT_RUN, RUN_KEY, Parent
from jstep.origin.arguments import Options
from jstep.record.schema import Start
from jstep.record.starts import original_of, read_starts, recorded_run, valid
from jstep.stores.untrusted import RecordedRun
from jstep.stores.urls import is_url, join_path, resolve_path, split_path


def find_lineage(
    options: Options, origin: Origin, earlier: Sequence[Start], new_name: str
) -> Lineage:
    """Return where a run comes from that does not branch off here.

    | directory | its lineage |
    |---|---|
    | a copy of a run's, at its first start | a new name, and the original's checkpoint as parent |
    | such a copy, in which earlier starts saved nothing | as the newest start has recorded it |
    | any other | as the checkpoint says; unknown without one |

    Args:
        earlier: The valid starts before this one.
        new_name: The name of the run if it is not the run that saved the checkpoint.
    """
    directory = options.directory
    if directory is None or not earlier:
        return origin.lineage
    saved_by = origin.extra.get(RUN_KEY)
    original = original_of(directory, earlier)
    if original is not None:
        parent: Parent | None = None
        if origin.kind is Kind.RESUMED:
            path = join_path(original, checkpoint_name(options.prefix, origin.step))
            parent = {"path": path, "step": origin.step}
            logger.info("%s is a copy: this run is a branch of %s from here on", directory, path)
        return Lineage(new_name, parent, saved_by, is_copy=True)
    newest = earlier[-1]
    has_own_name = newest[RUN_KEY] != newest[PARENT_RUN]
    if has_own_name and saved_by is not None and saved_by == newest[PARENT_RUN]:
        # The checkpoint is still the original's.
        return Lineage(newest[RUN_KEY], newest[PARENT], saved_by)
    return origin.lineage


def find_run_of_best(path: str) -> str | None:
    """Return the name of the run that kept the best checkpoint at a path; None if unknown.

    The checkpoint does not say it. The start that kept it is recorded in the directory of its run:
    that of the checkpoint, or the one above.
    """
    if is_url(path):
        return None
    directory, _ = split_path(path)
    for run_directory in (directory, os.path.dirname(directory)):
        with contextlib.suppress(OSError, ValueError):
            for starts in read_starts(run_directory).values():
                for start in valid(starts)[-1:]:
                    if _has_kept(start, recorded_run(run_directory, start, starts), path):
                        return str(start[RUN_KEY])
    return None


def _has_kept(start: Start, run: RecordedRun, path: str) -> bool:
    """Whether a start of a run has kept the checkpoint at this resolved path as a best one."""
    kept_paths = [run.find(kept_path) for _, _, kept_path in start["best"].values()]
    return any(
        kept_path is not None and resolve_path(kept_path) == path for kept_path in kept_paths
    )
