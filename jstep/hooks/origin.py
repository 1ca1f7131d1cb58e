"""What a run begins from, once it is known: the state that was passed, or a checkpoint."""

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jstep.hooks.run_extra import ENDED, HELD_VALUES, STOPPED, Parent


class Lineage(NamedTuple):
    """Where a run comes from.

    Attributes:
        name: The name of the run, which all its starts have in common; None if nothing has named it
            yet.
        parent: The path and step of the checkpoint that it branched from.
        parent_run: The name of the run that saved that checkpoint, if this is the first start.
        is_copy: Whether this is the first start in a copy of another run's directory.
    """

    name: str | None = None
    parent: Parent | None = None
    parent_run: str | None = None
    is_copy: bool = False


class Given(NamedTuple):
    """What a run needs to know of the state that was passed, once another one takes its place.

    Attributes:
        step: Its step; None if it is abstract, or was donated.
        values: The hyperparameters that are in it, by name; none if the run has no checkpoints.
    """

    step: int | None = None
    values: Mapping[str, float] = MappingProxyType({})


_UNKNOWN = Lineage()
_ABSTRACT = Given()


class Kind(enum.Enum):
    FRESH = "with the state passed"
    RESUMED = "from its own newest checkpoint"
    BRANCHED = (
        "from a checkpoint of another run, or with an edited state and the rest of that checkpoint"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run begins from. It is known before anything else is opened, and never changes.

    | kind | `step`, `extra` |
    |---|---|
    | `FRESH` | of the state passed, nothing |
    | `RESUMED` | of its newest checkpoint |
    | `BRANCHED` | of the parent's checkpoint, without `RUN_KEY`, `STOPPED` and `LAST_ITERATION` |

    Attributes:
        given: The state that was passed.
        source: What messages call the checkpoint: its name, or the path of a parent's.
        is_claimed: Whether the run holds the claim of its checkpoints. It needs none if it will
            save nothing.
    """

    kind: Kind = Kind.FRESH
    step: int = 0
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lineage: Lineage = _UNKNOWN
    given: Given = _ABSTRACT
    source: str = ""
    is_claimed: bool = False

    @property
    def name(self) -> str:
        """The name of the run; "" until it is known."""
        return self.lineage.name or ""

    @property
    def is_restored(self) -> bool:
        return self.kind is not Kind.FRESH

    @property
    def is_new_branch(self) -> bool:
        """Whether this start continues from another run's checkpoint."""
        return self.kind is Kind.BRANCHED

    @property
    def has_found_end(self) -> bool:
        """Whether all `end`s were made at the step that the run begins from."""
        return self.extra.get(ENDED) == self.step

    @property
    def is_at_branch_point(self) -> bool:
        """Whether the run is still where it branched off, and no hook of its own stopped it there.

        Then what the checkpoint holds is the parent's: a hook that has stopped the parent does not
        stop this run.
        """
        if self.kind is not Kind.RESUMED:
            return self.kind is Kind.BRANCHED
        parent = self.lineage.parent
        return parent is not None and parent["step"] == self.step and STOPPED not in self.extra

    @property
    def held_values(self) -> Mapping[str, float]:
        """Name → value, when the run began, of the hyperparameters in the state (`jstep.held`)."""
        initial: Mapping[str, float] = self.extra.get(HELD_VALUES, {})
        if self.kind is not Kind.FRESH and self.given.step != 0:
            return initial  # shapes, or a trained state, hold no initial values
        return {**self.given.values, **initial}
