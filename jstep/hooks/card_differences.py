"""The differences of cards, and which of these change the bits of a resumed run."""

import enum
import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jstep.core.checks import format_list, truncate
from jstep.core.secret_values import NOT_RECORDED
from jstep.hooks.cards import NOT_READY, PLACES, SECTIONS, SETTINGS
from jstep.stores.repository import UNKNOWN
from jstep.stores.timeline import CODE, CONFIG

# The effect of a difference on a resumed run: the only list of values that change its bits.


class Effect(enum.Enum):
    """The effect of a difference on the bits of a run."""

    BITS = "the bits of the run are others"
    PLACE = "the run is the same, computed elsewhere: its bits may differ by rounding"
    NONE = "the run is the same, or the program changes it on purpose"


_EFFECTS: Mapping[Any, Effect] = {
    "versions": Effect.PLACE,
    "settings": Effect.BITS,
    "environment": Effect.NONE,  # the settings say what the variables JAX_* do
    "devices": Effect.PLACE,
    "state": Effect.BITS,
    ("state", "sharding"): Effect.PLACE,
    ("state", "held"): Effect.NONE,  # the checkpoint holds the values, and another initial value is a warning
    "batches": Effect.BITS,
    "stages": Effect.NONE,  # names; the programs are compared
    "arguments": Effect.NONE,
    ("arguments", "batch_sharding"): Effect.PLACE,
    "lanes": Effect.BITS,
    CONFIG: Effect.BITS,  # the effect of its values is not known
    CODE: Effect.PLACE,
}
"""The effect of a section of the cards, and of some of its values."""
_XLA_FLAG = "XLA_FLAGS "
_HARMLESS_FLAG = re.compile("dump|log|profil|path|dir$|device_count")
"""XLA flags that write something, or say how many devices a CPU has: the devices are compared."""


# The differences of two cards.

_HASHES = {
    "state": {
        "hash": "paths, shapes or dtypes of its leaves differ",
        "sharding": "its leaves are sharded differently",
    },
    "batches": {"hash": "the definition differs"},
}
"""The values that only tell whether a section differs, and the line for each."""

_ABSENT = object()
_MAX_SHOWN = 6
_MAX_VALUE_LENGTH = 80
_MAX_ARGUMENT_LENGTH = 400
_PLACE = re.compile(r"/|\\|^\[?[\w.:-]+\]?:\d+$")
_ABSOLUTE = re.compile(r"~|/|\.{1,2}/|[A-Za-z]:[\\/]|\w+://")
_NAME_OF_PLACE = re.compile(r"(DIR|PATH|FILE|ADDRESS|ADDR|HOST|URL)$")

IN_A_AND_B = "in A", "in B"
BEFORE_AND_NOW = "before", "now"
"""How lines refer to two runs, and to two starts of one run."""


class CardDifference(NamedTuple):
    section: str
    name: str
    line: str

    @property
    def effect(self) -> Effect:
        if self.name.startswith(_XLA_FLAG):
            return Effect.NONE if _HARMLESS_FLAG.search(self.name) else Effect.BITS
        return _EFFECTS.get((self.section, self.name), _EFFECTS[self.section])


def card_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two cards, one per line. Paths and addresses are not compared.

    Example:
        >>> from jstep.hooks.card_differences import card_difference
        >>> card_difference({"batches": {"seed": 0, "rows": 100}}, {"batches": {"seed": 1, "rows": 100}})
        ['batches: seed: 0 in A, 1 in B']
    """
    return [difference.line for difference in _differences(a, b, IN_A_AND_B)] + list(_programs(a, b))


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], runs: tuple[str, str]) -> Iterator[CardDifference]:
    """Compare all sections except the programs."""
    for section, begins in SECTIONS.items():
        first, second = _values(a, section), _values(b, section)
        if section == "environment":
            first, second = _without_places(first, second)
        if section == CONFIG:
            first, second = _of_configs(a, b)
        if section == "settings":
            first, second = _without_defaults(first, second)
        changed = [
            CardDifference(section, name, begins + line)
            for name in _names(first, second)
            for line in differences(name, first.get(name, _ABSENT), second.get(name, _ABSENT), runs)
        ]
        first, second = _section(a, section), _section(b, section)
        for name, line in _HASHES.get(section, {}).items():
            # The sharding's hash is reported if the leaves are otherwise equal, another hash if nothing else differs.
            adds = first.get("hash") == second.get("hash") if name == "sharding" else not changed
            if adds and first.get(name) != second.get(name):
                changed.append(CardDifference(section, name, begins + line))
        yield from changed
    for line in differences("lanes", a.get("lanes"), b.get("lanes"), runs):
        yield CardDifference("lanes", "", line)
    codes = _code(a), _code(b)
    if None not in codes:
        for line in differences(CODE, *codes, runs):
            yield CardDifference(CODE, "", line)


def card_values(card: Mapping[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for section, begins in SECTIONS.items():
        values = _values(card, section)
        if section == "environment":
            values = next(_without_places(values))
        places = [name for name, value in values.items() if _is_place(value, card)]
        named |= _flat(begins, {name: value for name, value in values.items() if name not in places})
        named |= {f"{begins}{name}": str(_section(card, section).get(name))[:8] for name in _HASHES.get(section, ())}
    named["lanes"] = card.get("lanes")
    if (code := _code(card)) is not None:
        named[CODE] = code
    for program in card.get("programs") or ():
        named["step: optimizer"] = program.get("optimizer")
        named |= _flat("step: ", _section(program, "hyperparameters"))
        for element, of in _section(program, "elements").items():
            named |= _flat(f"step: {element}: ", of if isinstance(of, dict) else {})
        named["step: hash"] = str(program.get("hash"))[:8]
    return named


def _flat(begins: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, dict) or not value:
            flat[f"{begins}{name}"] = value
        elif value.keys() == {"0"}:  # one value from step 0 on
            flat |= _flat(begins, {name: value["0"]})
        else:
            flat |= _flat(begins, {f"{name}[{key}]": entry for key, entry in value.items()})
    return flat


def _of_configs(*cards: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configs of two cards, without places, secrets, and arguments of `train` in both."""
    if not all(isinstance(card.get(CONFIG), dict) for card in cards):
        return [{}, {}]
    first, second = (_section(card, CONFIG) for card in cards)
    of_first, of_second = (_section(card, "arguments") for card in cards)
    arguments = {json.dumps([of_first[name], of_second[name]]) for name in of_first if name in of_second}
    unready = {name for of in (first, second) for name, value in of.items() if value == NOT_READY}
    left_out = set()
    for name in first | second:
        values = [of[name] for of in (first, second) if name in of]
        is_argument = len(values) == 2 and json.dumps(values) in arguments
        are_places = all(
            _is_place(of[name], card) for of, card in zip((first, second), cards, strict=True) if name in of
        )
        is_ready = not any(name == late or name.startswith(f"{late}/") for late in unready)
        if is_argument or not is_ready or NOT_RECORDED in values or are_places:
            left_out.add(name)
    return [{name: value for name, value in of.items() if name not in left_out} for of in (first, second)]


def _is_place(value: object, card: Mapping[str, Any]) -> bool:
    """Whether a value is an absolute path or a URL, or a directory of the run, or above or below one."""
    if not isinstance(value, str) or not value:
        return False
    path = f"{value.rstrip('/')}/"
    arguments = _section(card, "arguments")
    own = [f"{place.rstrip('/')}/" for name in PLACES if isinstance(place := arguments.get(name), str)]
    return _ABSOLUTE.match(value) is not None or any(path.startswith(one) or one.startswith(path) for one in own)


def _code(card: Mapping[str, Any]) -> str | None:
    """The commit and the hash of the edits, in words; None if unknown."""
    code = _section(card, CODE)
    commit, edits = code.get("commit"), code.get("edits")
    if not isinstance(commit, str) or edits == UNKNOWN:
        return None
    return f"commit {commit[:8]}" + ("" if edits is None else f" with edits {edits} that are not committed")


def _section(card: Mapping[str, Any], section: str) -> dict[str, Any]:
    values = card.get(section)
    return dict(values) if isinstance(values, Mapping) else {}


def _values(card: Mapping[str, Any], section: str) -> dict[str, Any]:
    values = _section(card, section)
    if section == "stages":
        return {f"the stage from step {first}": name for first, name in values.items()}
    if section == "environment":  # each XLA flag is separate; its last value counts
        flags = (word.partition("=") for word in str(values.pop("XLA_FLAGS", "")).split())
        return {f"{_XLA_FLAG}{name}": value or "set" for name, _, value in flags} | values
    left_out = PLACES if section == "arguments" else _HASHES.get(section, ())
    return {name: value for name, value in values.items() if name not in left_out}


def _without_places(*runs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Environment variables, sorted, without those that hold a path or address in either run."""
    places = {name for of in runs for name in of if _NAME_OF_PLACE.search(name) or _PLACE.search(str(of[name]))}
    for of in runs:
        yield {name: of[name] for name in sorted(of) if name not in places}


def _without_defaults(*runs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings, without those that are at their default, or do not exist, in both runs."""

    def is_default(name: str, value: object) -> bool:
        return value in (None, "None", SETTINGS.get(name))

    left_out = {name for of in runs for name in of if all(is_default(name, one.get(name)) for one in runs)}
    for of in runs:
        yield {name: value for name, value in of.items() if name not in left_out}


def _names(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names in either; in the first's order if both have the same."""
    return list(a) if a.keys() == b.keys() else sorted({*a, *b})


def differences(name: str, a: object, b: object, runs: tuple[str, str] = IN_A_AND_B) -> Iterator[str]:
    """Describe the differences between two JSON values, one per line.

    `name` is empty for dicts whose keys are the names.
    """
    if type(a) is type(b) and a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() == b.keys() == {"0"}:  # one value from step 0 on
            yield from differences(name, a["0"], b["0"], runs)
            return
        for key in _names(a, b):
            yield from differences(f"{name}[{key}]" if name else key, a.get(key, _ABSENT), b.get(key, _ABSENT), runs)
    elif isinstance(a, list) and isinstance(b, list) and all(isinstance(x, str) for x in [*a, *b]):
        only = [[x for x in own if x not in other] for own, other in ((a, set(b)), (b, set(a)))]
        texts = [f"{', '.join(some)} only {run}" for some, run in zip(only, runs, strict=True) if some]
        if texts:
            yield f"{name}: {'; '.join(texts)}"
        else:
            yield f"{name}: another order, {_shown(a)} {runs[0]}, {_shown(b)} {runs[1]}"
    else:
        first, second = _both_shown(a, b)
        yield f"{name}: {first} {runs[0]}, {second} {runs[1]}"


def _both_shown(*values: object) -> list[str]:
    """Two texts that differ: as JSON if need be (0.1 and "0.1"), and then from shortly before the difference on."""
    shown = list(map(_shown, values))
    if shown[0] != shown[1]:
        return shown
    whole = [_shown(value) if value is _ABSENT else json.dumps(value) for value in values]
    pairs = enumerate(zip(*whole, strict=False))
    start = next((i for i, (x, y) in pairs if x != y), min(map(len, whole))) - _MAX_VALUE_LENGTH // 4
    return [truncate(f"…{text[start:]}" if start > 0 else text, _MAX_VALUE_LENGTH) for text in whole]


def _shown(value: object, longest: int = _MAX_VALUE_LENGTH) -> str:
    if value is _ABSENT:
        return "absent"
    return truncate(value if isinstance(value, str) and value else json.dumps(value), longest)


# The differences of two programs: their optimizers, hyperparameters and operations.


def _programs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    in_a, in_b = _by_stage(a), _by_stage(b)
    same_batches = _section(a, "batches") == _section(b, "batches")
    for stage in sorted(in_a.keys() & in_b.keys()):
        first, second = in_a[stage], in_b[stage]
        same_shapes = first.get("batch") == second.get("batch")
        if not same_shapes:
            if same_batches and "rows" in _section(a, "batches"):
                continue  # one run began at a step with another batch size
            yield from differences("batch", first.get("batch"), second.get("batch"))
        yield from (f"step: {line}" for line in _of_optimizers(first, second, IN_A_AND_B))
        if _have_other_hashes(first, second):
            traced = f"step: the traced {_name_of_stage(a, stage)}"
            if same_shapes:
                yield f"{traced} differs: {_why(first, second, IN_A_AND_B)}"
            elif operations := _counts("operations", first, second, IN_A_AND_B):
                yield f"{traced} differs, on batches of different shapes: {operations}"
            else:
                yield f"{traced} has the same operations; its numbers were not compared, as the batches differ in shape"


def _by_stage(card: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The program of one step of each stage."""
    programs = card.get("programs")
    return {
        program["stage"]: program
        for program in (programs if isinstance(programs, list) else ())
        if isinstance(program, Mapping) and type(program.get("stage")) is int
    }


def _name_of_stage(card: Mapping[str, Any], stage: int) -> str:
    return f"{_section(card, 'stages').get(str(stage), 'train_step')} (stage from step {stage})"


def _have_other_hashes(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return None not in (a.get("hash"), b.get("hash")) and a["hash"] != b["hash"]


def _of_optimizers(a: Mapping[str, Any], b: Mapping[str, Any], runs: tuple[str, str]) -> Iterator[str]:
    """Compare two optimizers and their hyperparameters, by their recorded calls if both have them.

    Calls that were typed differently are equal if the programs are.
    """
    in_a, in_b = _section(a, "elements"), _section(b, "elements")
    if not (in_a and in_b):
        if None not in (a.get("optimizer"), b.get("optimizer")):
            yield from differences("optimizer", a["optimizer"], b["optimizer"], runs)
        yield from differences("", _section(a, "hyperparameters"), _section(b, "hyperparameters"), runs)
        return
    if a.get("hash") is not None and a.get("hash") == b.get("hash"):
        return
    yield from differences("optimizer", list(in_a), list(in_b), runs)
    often = Counter(_argument_name(element, argument) for element, of in (in_a | in_b).items() for argument in of)
    for element in [element for element in in_a if element in in_b]:
        first, second = in_a[element], in_b[element]
        for argument in first:
            old, new = first[argument], second.get(argument, first[argument])
            # Of functions only the names are known; the traced step tells what they do.
            if old == new or (isinstance(old, dict) and isinstance(new, dict)):
                continue
            name = _argument_name(element, argument)
            name = name if often[name] == 1 else f"{element}.{argument}"
            yield f"{name}: {_argument(old)} {runs[0]}, {_argument(new)} {runs[1]}"


def _argument_name(element: str, argument: str) -> str:
    label, slash, _ = element.rpartition("/")
    return f"{label}{slash}{argument}"


def _argument(value: object) -> str:
    if isinstance(value, dict):
        return str(next(iter(value.values()), ""))
    return str(value) if value is None or isinstance(value, bool) else _shown(value, _MAX_ARGUMENT_LENGTH)


def _why(a: Mapping[str, Any], b: Mapping[str, Any], runs: tuple[str, str]) -> str:
    parts = [part for what in ("numbers", "operations") if (part := _counts(what, a, b, runs))]
    return "; ".join(parts) or "the same numbers and operations, in another order or on other shapes and constants"


def _counts(what: str, a: Mapping[str, Any], b: Mapping[str, Any], runs: tuple[str, str]) -> str:
    """Describe the numbers or operations whose counts differ."""
    first, second = _section(a, what), _section(b, what)
    changed = [name for name in _names(first, second) if first.get(name, 0) != second.get(name, 0)]
    texts = [f"{name} ({first.get(name, 0)} {runs[0]}, {second.get(name, 0)} {runs[1]})" for name in changed]
    return f"{what} {format_list(texts, _MAX_SHOWN)}" if changed else ""


# The changes from one start of a run to another that resumes from it.


class Changes(NamedTuple):
    """Differences that change the bits, and differences of versions, devices and layout."""

    bits: list[str]
    place: list[str]


def changes(before: Mapping[str, Any], now: Mapping[str, Any], step: int, leave_out: Iterable[str] = ()) -> Changes:
    """Describe the changes since an earlier start of a run, each once; the new start resumes from `step`."""
    # A setting that only one of two versions of jstep records is not a change.
    settings = _section(before, "settings").keys() & _section(now, "settings").keys()
    each = _differences(before, now, BEFORE_AND_NOW)
    relevant = [change for change in each if change.section != "settings" or change.name in settings]
    left_out, names = set(leave_out), {(change.section, change.name) for change in relevant}
    explained = {name for cause in names & _EFFECTS_ON.keys() for name in _EFFECTS_ON[cause]}
    relevant = [change for change in relevant if (change.section, change.name) not in explained]
    bits, place = (
        [change.line for change in relevant if change.effect is effect and change.section not in left_out]
        for effect in (Effect.BITS, Effect.PLACE)
    )
    of_programs = list(_changes_of_programs(before, now, step, relevant))
    if (code := _code(now)) is not None and _code(before) == code:
        same = f"; the code is the same ({code})"
        of_programs = [f"{line}{same}" if line.startswith(_TRACED_STEP) else line for line in of_programs]
    return Changes([*bits, *of_programs], place)


_EFFECTS_ON = {
    ("devices", "mesh"): {("state", "sharding"), ("arguments", "batch_sharding")},  # all shardings name their mesh
    ("settings", "jax_enable_x64"): {("state", "hash"), ("state", "dtypes")},  # the dtype of the step
}
"""Differences that follow from another one, which alone is reported."""


def _changes_of_programs(
    before: Mapping[str, Any], now: Mapping[str, Any], step: int, changed: Iterable[CardDifference]
) -> Iterator[str]:
    pair = _programs_at(before, now, step)
    if pair is None:
        return
    stage, one, other = pair
    own = list(_of_optimizers(_with_metrics_of(one, other), _with_metrics_of(other, one), BEFORE_AND_NOW))
    yield from own
    if not _have_other_hashes(one, other):
        return
    same_shapes = one.get("batch") == other.get("batch")
    if not (same_shapes or _without_rows(one) == _without_rows(other)):
        return
    lanes = {_lanes_at(before, step - 1), _lanes_at(now, step - 1), _lanes_at(now, stage)}
    influences = [one for one in changed if (one.section, one.name) in _TRACED or one.section in _TRACEDSECTIONS]
    gradients = _section(one, "gradients"), _section(other, "gradients")
    if not influences and len(lanes) == 1:
        # The hyperparameters explain an update that is traced differently.
        of_one, of_other = gradients if own else (one, other)
        if not same_shapes:  # numbers depend on the number of rows, and a single row needs no sum
            left_out = _PLACEMENT | {"reduce_sum"}
            some, others = _without(left_out, of_one), _without(left_out, of_other)
            why = _counts("operations", some, others, BEFORE_AND_NOW)
        else:
            why = _why(of_one, of_other, BEFORE_AND_NOW) if _have_other_hashes(of_one, of_other) else ""
    elif lanes == {None} and all(one.effect is Effect.PLACE and one.section != "versions" for one in influences):
        # Placement adds operations to the step, and changes the rows of a device.
        of_one, of_other = (_without(_PLACEMENT, program) for program in gradients)
        why = _counts("operations", of_one, of_other, BEFORE_AND_NOW)
    else:
        why = ""
    if why:
        yield f"{_TRACED_STEP} {_name_of_stage(now, stage)} differs: {why}"


_TRACED_STEP = "step: the traced"
_TRACEDSECTIONS = "settings", "devices", "state"
_TRACED = {("versions", "jstep"), ("versions", "jax"), ("versions", "jaxlib"), ("arguments", "batch_sharding")}
"""Values that enter the trace of a step, so that the same step may be traced differently."""

# fmt: off
_PLACEMENT = {
    "sharding_constraint", "reshard", "mesh_cast", "shard_map", "pvary", "psum", "psum_invariant", "all_gather",
    "all_gather_invariant", "reduce_scatter", "all_to_all", "ppermute", "device_put", "copy", "copy_p", "jit", "pjit",
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "convert_element_type",
    "optimization_barrier",
}
# fmt: on
"""Operations that place or arrange arrays; a mesh adds some to a step."""
_ROWS = re.compile(r"\[\d+")


def _without(names: Container[str], program: Mapping[str, Any]) -> dict[str, Any]:
    operations = _section(program, "operations")
    return {"operations": {name: count for name, count in operations.items() if name not in names}}


def _without_rows(program: Mapping[str, Any]) -> list[str]:
    batch = program.get("batch")
    return [_ROWS.sub("[", str(kind)) for kind in (batch if isinstance(batch, list) else [batch])]


def _with_metrics_of(program: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A program with the constant metrics that another also has: an uncompiled step has none."""
    own, others = _section(program, "hyperparameters"), _section(other, "hyperparameters")
    return {**program, "hyperparameters": {name: value for name, value in own.items() if name in others}}


def _programs_at(
    before: Mapping[str, Any], now: Mapping[str, Any], step: int
) -> tuple[int, Mapping[str, Any], Mapping[str, Any]] | None:
    """The stage in which a start begins, the earlier start's program for these steps, and its own.

    A stage that begins at the checkpoint, and did not before, was begun on purpose.
    """
    of_now = _by_stage(now)
    stage = next(iter(of_now), None)
    if stage is None:
        return None
    earlier = _at(before, "stages", step)
    if earlier != stage:
        earlier = _at(before, "stages", step - 1) if stage < step else None
    earlier_program = None if earlier is None else _by_stage(before).get(earlier)
    return None if earlier_program is None else (stage, earlier_program, of_now[stage])


def _at(card: Mapping[str, Any], section: str, step: int) -> int | None:
    """The first step of the stage of a step."""
    firsts = [int(first) for first in _section(card, section) if str(first).isdecimal()]
    return max((first for first in firsts if first <= step), default=None)


def _lanes_at(card: Mapping[str, Any], step: int) -> int | None:
    lanes = card.get("lanes")
    lanes = lanes.get(str(_at(card, "lanes", max(step, 0)))) if isinstance(lanes, Mapping) else lanes
    return lanes if isinstance(lanes, int) else None
