"""Several losses in one training step, each with its own parameters."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jstep.core import trees
from jstep.core.checks import as_function, as_text, kind, shown
from jstep.core.exceptions import note
from jstep.core.selection import VarList, check_form
from jstep.core.trees import Array, Params
from jstep.differentiate.loss_gradients import GATE_NONE, Differentiation, Inputs, gated
from jstep.differentiate.loss_outputs import join_returned, merge_summaries
from jstep.differentiate.microbatches import Part, together_squared

Losses: TypeAlias = Mapping[str, tuple[Callable[..., Any], VarList]]
"""Name → the loss and its var_list."""
_FORM = "(loss, var_list), such as (critic_loss, 'critic/*')"


@dataclasses.dataclass(frozen=True)
class SeveralLosses:
    """Losses that are differentiated at the same parameters, each with respect to its own.

    Attributes:
        each: Name of a loss → its differentiation.
        gate_gradients: The gate of all gradients together.
    """

    each: Mapping[str, Differentiation]
    gate_gradients: int

    @property
    def looks_at_rows(self) -> bool:
        """Whether one of the losses depends on how the rows of the batch are sharded."""
        return any(one.looks_at_rows for one in self.each.values())

    def __call__(self, given: Inputs) -> Part:
        """Return the sum of the losses, all gradients in one tree, and, as aux, the loss and aux of each by name."""
        chosen = _without_overlap(given.params, self.each)
        leaves, treedef = trees.flatten(given.params)
        gradients: list[Any] = [None] * len(leaves)
        parts: dict[str, Part] = {}
        for i, (name, differentiate) in enumerate(self.each.items()):
            try:
                parts[name] = differentiate(given.for_part(i))
            except Exception as error:
                note(error, f"This error was raised while the loss {name!r} was differentiated.")
                raise
            found = treedef.flatten_up_to(parts[name].gradients)
            if all(found[place] is None for place in chosen[name]):
                paths = trees.paths_of(given.params)
                raise ValueError(
                    f"loss_fn: the loss {name!r} depends on none of the parameters that it trains, "
                    f"{[paths[place] for place in chosen[name]][:20]}; give it others, or leave it out"
                )
            gradients = trees.with_leaves(gradients, chosen[name], [found[place] for place in chosen[name]])
        return Part(
            _sum([part.loss for part in parts.values()]),
            None,
            {name: (part.loss, part.aux) for name, part in parts.items()},
            treedef.unflatten(gated(gradients, self.gate_gradients)),
            merge_summaries([part.summaries for part in parts.values()]),
            together_squared([part.squares for part in parts.values()]),
        )


def several_losses(losses: Losses, make: Callable[[Any, VarList], Differentiation], **without: bool) -> SeveralLosses:
    """Create `SeveralLosses` from the arguments of `minimize`.

    Args:
        losses: Name → (loss, var_list).
        make: Returns the differentiation of a loss with its var_list.
        **without: Arguments that cannot be combined with several losses → whether they were given.

    Raises:
        TypeError: An entry is not of the form (loss, var_list). The message contains its name.
        ValueError: There are no losses, or one of the arguments in `without` was given.
    """
    for argument, is_given in without.items():
        if is_given:
            why = "each loss has its own" if argument == "var_list" else "it has no owner among several losses"
            raise ValueError(f"{argument}: must not be given beside a mapping of losses; {why}")
    if not losses:
        raise ValueError(f"loss_fn={shown(losses)}: must have at least one loss, name -> {_FORM}")
    each = {}
    for name, entry in losses.items():
        as_text(name, "a name in loss_fn")
        place = f"loss_fn[{name!r}]"
        if not (isinstance(entry, tuple | list) and len(entry) == 2):
            raise TypeError(f"{place}={shown(entry)}: must be {_FORM}, got {kind(entry)}")
        as_function(entry[0], f"{place}[0]", "(params, *args) -> loss")
        check_form(entry[1], f"{place}[1]")
        each[name] = make(*entry)
    gate = next(iter(each.values())).gate_gradients
    each = {name: dataclasses.replace(one, gate_gradients=GATE_NONE) for name, one in each.items()}
    return SeveralLosses(each, gate)


def replaced(differentiate: Differentiation | SeveralLosses, **changes: Any) -> Differentiation | SeveralLosses:
    """Apply `dataclasses.replace` to one loss, or to each of several."""
    if not isinstance(differentiate, SeveralLosses):
        return dataclasses.replace(differentiate, **changes)
    each = {name: dataclasses.replace(one, **changes) for name, one in differentiate.each.items()}
    return dataclasses.replace(differentiate, each=each)


def shown_losses(part: Part, has_aux: bool, *, is_several: bool) -> dict[str, Mapping[str, Any]]:
    """Return the metrics of the losses, their aux and their summaries, by a description of their origin."""
    if not is_several:
        aux, made = join_returned(_by_name(part.aux), part.summaries)
        found = {"the loss": {"loss": part.loss}, "aux": aux if has_aux else {}}
    else:
        made, found = part.summaries, {"the sum of the losses": {"loss": part.loss}}
        for name, (loss, aux) in part.aux.items():
            found[f"the loss {name!r}"] = {f"{name}/loss": loss}
            found[f"aux of {name!r}"] = {f"{name}/{key}": x for key, x in _by_name(aux).items()} if has_aux else {}
    return found | {"the summaries of the loss": {} if made is None else {"summaries": made}}


def _by_name(aux: Any) -> Mapping[str, Any]:
    return aux if isinstance(aux, Mapping) else {"aux": aux}


def _without_overlap(params: Params, each: Mapping[str, Differentiation]) -> dict[str, list[int]]:
    """Return the indices of the leaves that each loss trains.

    Raises:
        ValueError: Two losses train the same leaf. The message contains the paths.
    """
    chosen = {name: one.selected(params, f"loss_fn[{name!r}][1]") for name, one in each.items()}
    for (first, its), (second, others) in itertools.combinations(chosen.items(), 2):
        both = sorted({*its} & {*others})
        if both:
            paths = trees.paths_of(params)
            raise ValueError(
                f"loss_fn: the losses {first!r} and {second!r} both train {[paths[place] for place in both][:20]}; "
                "give each parameter to one of them"
            )
    return chosen


def _sum(losses: list[Array]) -> Array:
    dtypes = {loss.dtype for loss in losses}
    if len(dtypes) > 1:
        widest = max((trees.compute_dtype(dtype) for dtype in dtypes), key=lambda dtype: dtype.itemsize)
        losses = [loss.astype(widest) for loss in losses]
    return functools.reduce(lambda total, loss: total + loss, losses)
