"""Access to the record of the run in progress, for other rooms."""

from typing import Any

from jstep.record.process_files import ProcessFile
from jstep.record.schema import Start
from jstep.record.starts import StartFile, valid


def file_of(run: Any) -> StartFile | None:
    """Return the record of this start while it is open; any thread writes it.

    Only process 0 has it.
    """
    file: StartFile | None = run.shared.get(StartFile)
    return file


def process_file_of(run: Any) -> ProcessFile | None:
    """Return the record of this process, if it is not process 0."""
    file: ProcessFile | None = run.shared.get(ProcessFile)
    return file


def earlier_starts(run: Any) -> list[Start]:
    file = file_of(run)
    if file is None:
        return []
    return valid(file.earlier)


def had_name(run: Any, name: str) -> bool:
    """Whether an earlier start in this directory had this name, even if it never saved."""
    return any(start["run"] == name for start in earlier_starts(run))


def was_best_checkpoint(run: Any, path: str) -> bool:
    """Whether an earlier start of this run has kept a checkpoint as the best."""
    kept_paths: set[str] = set()
    for start in earlier_starts(run):
        kept_paths.update(kept for _, _, kept in start["best"].values())
    return path in kept_paths
