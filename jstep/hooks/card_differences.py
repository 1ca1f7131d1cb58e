"""The cards of a timeline, their differences, and which of these change the bits of a run that resumes."""

import dataclasses
import enum
import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

from jstep.core.checks import cut, listed
from jstep.stores.timeline import START, fields_with

VERSION = 1
"""The version of the cards."""

PLACES = ("checkpoint_dir", "logdir", "compile_cache", "start_from")
"""Arguments that name the directories of a run: recorded, never compared."""

CONFIG, CODE = "config", "code"
"""What only some cards have: the config of the program, and its commit; keys of a checkpoint's `extra`, too."""
NOT_RECORDED, UNKNOWN = "(not recorded)", "unknown"
"""What stands for a value that must not be recorded, and for edits that git took too long to find."""

# The cards of a timeline.


@dataclasses.dataclass
class Start:
    """One start of a run.

    Attributes:
        id: Its name in the timeline.
        prefix: The prefix of the run's checkpoints.
        time: When it began, in seconds since 1970; None if that is not known.
        card: Its card, with all of its programs; None if it wrote none, or if its line is torn.
    """

    id: str
    prefix: str
    time: Any = None
    card: dict[str, Any] | None = None


def starts_of(where: str, start: str = "") -> list[Start]:
    """Return all starts in a directory or below a URL, in order. Corrupted lines, and unknown ones, are skipped.

    Args:
        where: The directory or URL.
        start: The name of the start that is looked for: others may be left out.

    Raises:
        FileNotFoundError: There is no timeline.
        OSError: The directory or a timeline cannot be read.
    """
    found: list[Start] = []
    latest: dict[tuple[str, str], Start] = {}
    codes: dict[int, dict[str, Any]] = {}
    for line in fields_with(where, "card", "version", CODE, start=start):
        kind, prefix, programs = line.get("kind"), line.get("prefix", "model"), line.get("programs")
        if kind not in (START, "card", CODE) or not isinstance(prefix, str):
            continue
        key = prefix, str(line.get("start"))
        one = latest.get(key)
        if one is None or ("card" in line and one.card is not None):
            one = latest[key] = Start(key[1], prefix)
            found.append(one)
        if kind == START:
            one.time = line.get("time")
        elif kind == CODE:
            codes[id(one)] = {name: line.get(name) for name in ("commit", "edits")}
        elif "card" in line:
            one.card = line
        elif one.card is not None and isinstance(programs, list) and isinstance(one.card.get("programs"), list):
            one.card["programs"] = [*one.card["programs"], *programs]
    for one in found:
        if one.card is not None and id(one) in codes:
            one.card[CODE] = codes[id(one)]
    return found


def is_whole(card: object) -> TypeGuard[dict[str, Any]]:
    """Whether a card is of this version and has all of its parts."""
    return (
        isinstance(card, dict)
        and card.get("card") == VERSION
        and all(isinstance(card.get(name), dict) for name in _SECTIONS if name != CONFIG)
        and isinstance(card.get("programs"), list)
    )


# What a difference means for a run that resumes: the one list of what changes its bits.


class Effect(enum.Enum):
    """The meaning of a difference between two starts of a run for its bits."""

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
    CONFIG: Effect.BITS,  # what its values do is not known
    CODE: Effect.PLACE,
}
"""The effect of a section of the cards, and of some of its values."""
_XLA_FLAG = "XLA_FLAGS "
_HARMLESS_FLAG = re.compile("dump|log|profil|path|dir$|device_count")
"""XLA flags that write something, or say how many devices a CPU has: the devices are compared."""


# The differences of two cards.

_SECTIONS = {
    "versions": "",
    "settings": "",
    "environment": "",
    "devices": "devices: ",
    "state": "state: ",
    "batches": "batches: ",
    "stages": "",
    "arguments": "train: ",
    CONFIG: "config: ",
}
"""The sections that are compared value by value, and the prefix of their lines."""

_HASHES = {
    "state": {
        "hash": "paths, shapes or dtypes of its leaves differ",
        "sharding": "its leaves are sharded differently",
    },
    "batches": {"hash": "the definition differs"},
}
"""The values that only tell whether a section differs, and the line for each."""

_ABSENT = object()
_MOST = 6
_LONGEST_VALUE = 80
_LONGEST_ARGUMENT = 400
_PLACE = re.compile(r"/|\\|^\[?[\w.:-]+\]?:\d+$")
_ABSOLUTE = re.compile(r"~|/|\.{1,2}/|[A-Za-z]:[\\/]|\w+://")
_NAME_OF_PLACE = re.compile(r"(DIR|PATH|FILE|ADDRESS|ADDR|HOST|URL)$")

IN_A_AND_B = "in A", "in B"
BEFORE_AND_NOW = "before", "now"
"""How lines refer to two runs, and to two starts of one run."""


class Difference(NamedTuple):
    """A difference between two cards.

    Attributes:
        section: The section of the cards.
        name: The name of the value, or an empty one.
        line: Its description.
    """

    section: str
    name: str
    line: str

    @property
    def effect(self) -> Effect:
        """Its meaning for a run that resumes."""
        if self.name.startswith(_XLA_FLAG):
            return Effect.NONE if _HARMLESS_FLAG.search(self.name) else Effect.BITS
        return _EFFECTS.get((self.section, self.name), _EFFECTS[self.section])


def card_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two cards, one per line. Paths and addresses are not compared.

    Args:
        a: The card of a run, from the `card` lines of its timeline.
        b: The card of another run.

    Returns:
        The differences; empty if the cards are equal.

    Example:
        >>> from jstep.hooks.card_differences import card_difference
        >>> card_difference({"batches": {"seed": 0, "rows": 100}}, {"batches": {"seed": 1, "rows": 100}})
        ['batches: seed: 0 in A, 1 in B']
    """
    return [one.line for one in _differences(a, b, IN_A_AND_B)] + list(_programs(a, b))


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], runs: tuple[str, str]) -> Iterator[Difference]:
    """Compare all sections but the programs."""
    for section, begins in _SECTIONS.items():
        one, other = _values(a, section), _values(b, section)
        if section == "environment":
            one, other = _without_places(one, other)
        if section == CONFIG:
            one, other = _of_configs(a, b)
        found = [
            Difference(section, name, begins + line)
            for name in _names(one, other)
            for line in differences(name, one.get(name, _ABSENT), other.get(name, _ABSENT), runs)
        ]
        one, other = _section(a, section), _section(b, section)
        for name, line in _HASHES.get(section, {}).items():
            # A hash adds to other lines only if it is that of the sharding, and the leaves are otherwise the same.
            adds = one.get("hash") == other.get("hash") if name == "sharding" else not found
            if adds and one.get(name) != other.get(name):
                found.append(Difference(section, name, begins + line))
        yield from found
    for line in differences("lanes", a.get("lanes"), b.get("lanes"), runs):
        yield Difference("lanes", "", line)
    codes = _code(a), _code(b)
    if None not in codes:
        for line in differences(CODE, *codes, runs):
            yield Difference(CODE, "", line)


def card_values(card: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a card by the names that lines of a difference bear; hashes as 8 digits."""
    found: dict[str, Any] = {}
    for section, begins in _SECTIONS.items():
        values = _values(card, section)
        if section == "environment":
            values = next(_without_places(values))
        places = [name for name, value in values.items() if _is_place(value)]
        found |= _flat(begins, {name: value for name, value in values.items() if name not in places})
        found |= {f"{begins}{name}": str(_section(card, section).get(name))[:8] for name in _HASHES.get(section, ())}
    found["lanes"] = card.get("lanes")
    if (code := _code(card)) is not None:
        found[CODE] = code
    for program in card.get("programs") or ():
        found["step: optimizer"] = program.get("optimizer")
        found |= _flat("step: ", _section(program, "hyperparameters"))
        for element, of in _section(program, "elements").items():
            found |= _flat(f"step: {element}: ", of if isinstance(of, dict) else {})
        found["step: hash"] = str(program.get("hash"))[:8]
    return found


def _flat(begins: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section, those of nested ones by their path; one from step 0 on is that value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, dict) or not value:
            found[f"{begins}{name}"] = value
        elif value.keys() == {"0"}:
            found |= _flat(begins, {name: value["0"]})
        else:
            found |= _flat(begins, {f"{name}[{key}]": one for key, one in value.items()})
    return found


def _of_configs(*cards: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configs of two cards that have one, without places, secrets, and what is an argument of `train` in both."""
    if not all(isinstance(card.get(CONFIG), dict) for card in cards):
        return [{}, {}]
    one, other = (_section(card, CONFIG) for card in cards)
    of_one, of_other = (_section(card, "arguments") for card in cards)
    arguments = {json.dumps([of_one[name], of_other[name]]) for name in of_one if name in of_other}
    left_out = set()
    for name in one | other:
        values = [of[name] for of in (one, other) if name in of]
        is_argument = len(values) == 2 and json.dumps(values) in arguments
        if is_argument or NOT_RECORDED in values or all(map(_is_place, values)):
            left_out.add(name)
    return [{name: value for name, value in of.items() if name not in left_out} for of in (one, other)]


def _is_place(value: object) -> bool:
    return isinstance(value, str) and _ABSOLUTE.match(value) is not None


def _code(card: Mapping[str, Any]) -> str | None:
    """The commit and the hash of the edits, in words; None if that is not known."""
    code = _section(card, CODE)
    commit, edits = code.get("commit"), code.get("edits")
    if not isinstance(commit, str) or edits == UNKNOWN:
        return None
    return f"commit {commit[:8]}" + ("" if edits is None else f" with edits {edits} that are not committed")


def _section(card: Mapping[str, Any], section: str) -> dict[str, Any]:
    found = card.get(section)
    return dict(found) if isinstance(found, Mapping) else {}


def _values(card: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The values of a section that are compared one by one."""
    found = _section(card, section)
    if section == "stages":
        return {f"the stage from step {first}": name for first, name in found.items()}
    if section == "environment":  # each XLA flag is separate; its last value counts
        flags = (word.partition("=") for word in str(found.pop("XLA_FLAGS", "")).split())
        return {f"{_XLA_FLAG}{name}": value or "set" for name, _, value in flags} | found
    left_out = PLACES if section == "arguments" else _HASHES.get(section, ())
    return {name: value for name, value in found.items() if name not in left_out}


def _without_places(*runs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The environment variables of two runs, sorted, without those that hold a path or an address in either."""
    places = {name for of in runs for name in of if _NAME_OF_PLACE.search(name) or _PLACE.search(str(of[name]))}
    for of in runs:
        yield {name: of[name] for name in sorted(of) if name not in places}


def _names(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names in either; in the order of the first if both have the same names, else sorted."""
    return list(a) if a.keys() == b.keys() else sorted({*a, *b})


def differences(name: str, a: object, b: object, runs: tuple[str, str] = IN_A_AND_B) -> Iterator[str]:
    """Describe the differences between two JSON values, one per line.

    Args:
        name: The name of the values; empty for dicts whose keys are the names.
        a: The value of a run.
        b: The value of another run.
        runs: How the lines refer to the runs.
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
        only = [[x for x in one if x not in other] for one, other in ((a, b), (b, a))]
        texts = [f"{', '.join(some)} only {run}" for some, run in zip(only, runs, strict=True) if some]
        if texts:
            yield f"{name}: {'; '.join(texts)}"
        else:
            yield f"{name}: another order, {_shown(a)} {runs[0]}, {_shown(b)} {runs[1]}"
    else:
        yield f"{name}: {_shown(a)} {runs[0]}, {_shown(b)} {runs[1]}"


def _shown(value: object, longest: int = _LONGEST_VALUE) -> str:
    if value is _ABSENT:
        return "absent"
    return cut(value if isinstance(value, str) and value else json.dumps(value), longest)


# The differences of two programs: their optimizers, their hyperparameters, what they compute.


def _programs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Compare the programs of the stages that both runs have."""
    in_a, in_b = _by_stage(a), _by_stage(b)
    same_batches = _section(a, "batches") == _section(b, "batches")
    for stage in sorted(in_a.keys() & in_b.keys()):
        one, other = in_a[stage], in_b[stage]
        same_shapes = one.get("batch") == other.get("batch")
        if not same_shapes:
            if same_batches and "rows" in _section(a, "batches"):
                continue  # one run began at a step with another batch size
            yield from differences("batch", one.get("batch"), other.get("batch"))
        yield from (f"step: {line}" for line in _of_optimizers(one, other, IN_A_AND_B))
        if _have_other_hashes(one, other):
            traced = f"step: the traced {_name_of_stage(a, stage)}"
            if same_shapes:
                yield f"{traced} differs: {_why(one, other, IN_A_AND_B)}"
            elif operations := _counts("operations", one, other, IN_A_AND_B):
                yield f"{traced} differs, on batches of different shapes: {operations}"
            else:
                yield f"{traced} has the same operations; its numbers were not compared, as the batches differ in shape"


def _by_stage(card: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The program of each stage: that of one step, whatever the number of steps of a call."""
    programs = card.get("programs")
    return {
        one["stage"]: one
        for one in (programs if isinstance(programs, list) else ())
        if isinstance(one, Mapping) and type(one.get("stage")) is int
    }


def _name_of_stage(card: Mapping[str, Any], stage: int) -> str:
    return f"{_section(card, 'stages').get(str(stage), 'train_step')} (stage from step {stage})"


def _have_other_hashes(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return None not in (a.get("hash"), b.get("hash")) and a["hash"] != b["hash"]


def _of_optimizers(a: Mapping[str, Any], b: Mapping[str, Any], runs: tuple[str, str]) -> Iterator[str]:
    """Compare the optimizers of two programs and their hyperparameters, by the calls that made them if both know these.

    Calls that differ in what they were typed like, while the programs are equal, are equal.
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
        one, other = in_a[element], in_b[element]
        for argument in one:
            old, new = one[argument], other.get(argument, one[argument])
            # Of functions only the names are known; the traced step tells what they do.
            if old == new or (isinstance(old, dict) and isinstance(new, dict)):
                continue
            name = _argument_name(element, argument)
            name = name if often[name] == 1 else f"{element}.{argument}"
            yield f"{name}: {_argument(old)} {runs[0]}, {_argument(new)} {runs[1]}"


def _argument_name(element: str, argument: str) -> str:
    """The name of an argument of an element, below its label: `critic/learning_rate`."""
    label, slash, _ = element.rpartition("/")
    return f"{label}{slash}{argument}"


def _argument(value: object) -> str:
    if isinstance(value, dict):
        return str(next(iter(value.values()), ""))
    return str(value) if value is None or isinstance(value, bool) else _shown(value, _LONGEST_ARGUMENT)


def _why(a: Mapping[str, Any], b: Mapping[str, Any], runs: tuple[str, str]) -> str:
    parts = [part for what in ("numbers", "operations") if (part := _counts(what, a, b, runs))]
    return "; ".join(parts) or "the same numbers and operations, in another order or on other shapes and constants"


def _counts(what: str, a: Mapping[str, Any], b: Mapping[str, Any], runs: tuple[str, str]) -> str:
    """The numbers or operations that the programs have in different counts; empty if there are none."""
    one, other = _section(a, what), _section(b, what)
    changed = [name for name in _names(one, other) if one.get(name, 0) != other.get(name, 0)]
    texts = [f"{name} ({one.get(name, 0)} {runs[0]}, {other.get(name, 0)} {runs[1]})" for name in changed]
    return f"{what} {listed(texts, _MOST)}" if changed else ""


# What has changed from one start of a run to another that resumes from it.


class Changes(NamedTuple):
    """The differences between two starts of a run, one per line.

    Attributes:
        bits: Those that change its bits.
        place: Those of versions, devices and layout.
    """

    bits: list[str]
    place: list[str]


def changes(before: Mapping[str, Any], now: Mapping[str, Any], step: int, leave_out: Iterable[str] = ()) -> Changes:
    """Describe what has changed since an earlier start of a run, each change once.

    Args:
        before: The card of that start.
        now: The card of this one.
        step: The step of the checkpoint that this one resumes from.
        leave_out: The sections that are not compared.
    """
    # What one of two versions of jstep does not record of the settings is not a change.
    settings = _section(before, "settings").keys() & _section(now, "settings").keys()
    each = _differences(before, now, BEFORE_AND_NOW)
    found = [one for one in each if one.section != "settings" or one.name in settings]
    left_out, names = set(leave_out), {(one.section, one.name) for one in found}
    explained = {name for cause in names & _EFFECTS_ON.keys() for name in _EFFECTS_ON[cause]}
    found = [one for one in found if (one.section, one.name) not in explained]
    bits, place = (
        [one.line for one in found if one.effect is effect and one.section not in left_out]
        for effect in (Effect.BITS, Effect.PLACE)
    )
    of_programs = list(_changes_of_programs(before, now, step, found))
    if (code := _code(now)) is not None and _code(before) == code:
        same = f"; the code is the same ({code})"
        of_programs = [f"{line}{same}" if line.startswith(_TRACED_STEP) else line for line in of_programs]
    return Changes([*bits, *of_programs], place)


_EFFECTS_ON = {
    ("devices", "mesh"): {("state", "sharding"), ("arguments", "batch_sharding")},  # all shardings name their mesh
    ("settings", "jax_enable_x64"): {("state", "hash"), ("state", "dtypes")},  # that of the step
}
"""Differences that follow from another one, which is the change."""


def _changes_of_programs(
    before: Mapping[str, Any], now: Mapping[str, Any], step: int, found: Iterable[Difference]
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
    influences = [one for one in found if (one.section, one.name) in _TRACED or one.section in _TRACED_SECTIONS]
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
_TRACED_SECTIONS = "settings", "devices", "state"
_TRACED = {("versions", "jstep"), ("versions", "jax"), ("versions", "jaxlib"), ("arguments", "batch_sharding")}
"""What enters the trace of a step, so that the same step may be traced differently."""

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
    """The types of the arrays of a batch, without their numbers of rows."""
    batch = program.get("batch")
    return [_ROWS.sub("[", str(one)) for one in (batch if isinstance(batch, list) else [batch])]


def _with_metrics_of(program: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A program with the constant metrics that another one has, too: a step that is not compiled has none."""
    own, others = _section(program, "hyperparameters"), _section(other, "hyperparameters")
    return {**program, "hyperparameters": {name: value for name, value in own.items() if name in others}}


def _programs_at(
    before: Mapping[str, Any], now: Mapping[str, Any], step: int
) -> tuple[int, Mapping[str, Any], Mapping[str, Any]] | None:
    """The stage in which a start begins, the program that the earlier start had for these steps, and its own.

    A stage that begins at the checkpoint, and did not before, is one that the program begins on purpose.
    """
    of_now = _by_stage(now)
    stage = next(iter(of_now), None)
    if stage is None:
        return None
    earlier = _at(before, "stages", step)
    if earlier != stage:
        earlier = _at(before, "stages", step - 1) if stage < step else None
    one = None if earlier is None else _by_stage(before).get(earlier)
    return None if one is None else (stage, one, of_now[stage])


def _at(card: Mapping[str, Any], section: str, step: int) -> int | None:
    """The first step of the stage to which a step belongs."""
    firsts = [int(first) for first in _section(card, section) if str(first).isdecimal()]
    return max((first for first in firsts if first <= step), default=None)


def _lanes_at(card: Mapping[str, Any], step: int) -> int | None:
    lanes = card.get("lanes")
    lanes = lanes.get(str(_at(card, "lanes", max(step, 0)))) if isinstance(lanes, Mapping) else lanes
    return lanes if isinstance(lanes, int) else None
