"""Several losses in one training step, each with parameters of its own."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax

from jstep.core import trees
from jstep.core.checks import as_function, as_text, kind, shown
from jstep.core.collecting import together, with_returned
from jstep.core.types import Array, Params
from jstep.core.var_list import VarList, check_form, selected
from jstep.differentiate import GATE_NONE
from jstep.differentiate.engine import Differentiation, Inputs
from jstep.differentiate.gating import gated
from jstep.differentiate.microbatches import Part
from jstep.differentiate.noise import together_squared

Losses: TypeAlias = Mapping[str, tuple[Callable[..., Any], VarList]]
"""Name → the loss and what it trains."""
_FORM = "(loss, var_list), such as (critic_loss, 'critic/*')"


@dataclasses.dataclass(frozen=True)
class SeveralLosses:
    """Losses that are differentiated at the same parameters, each with respect to its own.

    Attributes:
        each: The name of each loss → how it is differentiated.
        gate_gradients: Of the gradients of all.
    """

    each: Mapping[str, Differentiation]
    gate_gradients: int

    @property
    def looks_at_rows(self) -> bool:
        """Whether one of them follows how the rows of the batch are sharded."""
        return any(one.looks_at_rows for one in self.each.values())

    def __call__(self, given: Inputs) -> Part:
        """The sum of the losses, all gradients in one tree, and as aux the loss and aux of each by its name."""
        chosen = _without_overlap(given.params, {name: one.var_list for name, one in self.each.items()})
        leaves, treedef = trees.flatten(given.params)
        gradients: list[Any] = [None] * len(leaves)
        parts: dict[str, Part] = {}
        for i, (name, differentiate) in enumerate(self.each.items()):
            key = None if given.key is None else jax.random.fold_in(given.key, i)
            try:
                parts[name] = differentiate(given._replace(key=key))
            except Exception as error:
                error.add_note(f"It was raised while the loss {name!r} was differentiated.")
                raise
            found = treedef.flatten_up_to(parts[name].gradients)
            gradients = trees.with_leaves(gradients, chosen[name], [found[place] for place in chosen[name]])
        return Part(
            _sum([part.loss for part in parts.values()]),
            None,
            {name: (part.loss, part.aux) for name, part in parts.items()},
            treedef.unflatten(gated(gradients, self.gate_gradients)),
            together([part.summaries for part in parts.values()]),
            together_squared([part.squares for part in parts.values()]),
        )


def several_losses(losses: Losses, make: Callable[[Any, VarList], Differentiation], **without: bool) -> SeveralLosses:
    """Several losses, from what `minimize` was given.

    Args:
        losses: Name → (loss, var_list).
        make: From a loss and its var_list to how it is differentiated.
        **without: Arguments that make no sense beside several losses → whether they were given.

    Raises:
        TypeError: An entry is not of that form (names it).
        ValueError: There is none, or one of those arguments was given.
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
    return SeveralLosses(_changed(each, gate_gradients=GATE_NONE), gate)


def replaced(differentiate: Differentiation | SeveralLosses, **changes: Any) -> Differentiation | SeveralLosses:
    """As `dataclasses.replace`, of one loss or of each of several."""
    if isinstance(differentiate, SeveralLosses):
        return dataclasses.replace(differentiate, each=_changed(differentiate.each, **changes))
    return dataclasses.replace(differentiate, **changes)


def shown_losses(part: Part, has_aux: bool, *, is_several: bool) -> dict[str, Mapping[str, Any]]:
    """What metrics show of the losses, their aux and their summaries, by what it is."""
    if not is_several:
        aux, made = with_returned(_by_name(part.aux), part.summaries)
        found = {"the loss": {"loss": part.loss}, "aux": aux if has_aux else {}}
    else:
        made, found = part.summaries, {"the sum of the losses": {"loss": part.loss}}
        for name, (loss, aux) in part.aux.items():
            found[f"the loss {name!r}"] = {f"{name}/loss": loss}
            found[f"aux of {name!r}"] = {f"{name}/{key}": x for key, x in _by_name(aux).items()} if has_aux else {}
    return found | {"what the loss made": {} if made is None else {"summaries": made}}


def name_of(loss_fn: Any) -> str:
    """What a step is called: as its loss, or its losses; `train_step` if that has no name."""
    if isinstance(loss_fn, Mapping):
        return "+".join(loss_fn)
    name = getattr(loss_fn, "__name__", "")
    return name if isinstance(name, str) and name.isidentifier() else "train_step"


def _by_name(aux: Any) -> Mapping[str, Any]:
    return aux if isinstance(aux, Mapping) else {"aux": aux}


def _changed(each: Mapping[str, Differentiation], **changes: Any) -> dict[str, Differentiation]:
    return {name: dataclasses.replace(one, **changes) for name, one in each.items()}


def _without_overlap(params: Params, var_lists: Mapping[str, VarList]) -> dict[str, list[int]]:
    """The places of what each loss trains.

    Raises:
        ValueError: Two of them train the same leaf; names the paths.
    """
    chosen: dict[str, list[int]] = {}
    for name, var_list in var_lists.items():
        chosen[name] = selected(params, var_list, f"loss_fn[{name!r}][1]")
        for other, places in chosen.items():
            both = sorted(set(places) & set(chosen[name]))
            if both and other != name:
                paths = trees.paths_of(params)
                raise ValueError(
                    f"loss_fn: the losses {other!r} and {name!r} both train {[paths[place] for place in both][:20]}; "
                    "give each parameter to one of them"
                )
    return chosen


def _sum(losses: list[Array]) -> Array:
    dtypes = {loss.dtype for loss in losses}
    if len(dtypes) > 1:
        widest = max((trees.compute_dtype(dtype) for dtype in dtypes), key=lambda dtype: dtype.itemsize)
        losses = [loss.astype(widest) for loss in losses]
    return functools.reduce(lambda total, loss: total + loss, losses)
