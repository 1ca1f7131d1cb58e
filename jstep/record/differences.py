"""The differences of two starts, name by name, and which of them change a resumed run's bits."""

import difflib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.checks import shortest_digits, truncate
from jstep.core.secret_text import NOT_RECORDED
from jstep.record.starts import read_programs

SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_numpy_dtype_promotion", "jax_explicit_x64_dtypes",
    "jax_random_seed_offset", "jax_high_dynamic_range_gumbel", "jax_softmax_custom_jvp",
    "jax_allow_f16_reductions", "jax_disable_jit", "jax_disable_most_optimizations",
    "jax_optimization_level", "jax_exec_time_optimization_effort",
)  # fmt: skip
"""Settings of JAX that change numerical results, wherever they were set."""
_PRNG = "jax_default_prng_impl"
SECTIONS = {
    "versions": "", "settings": "", "environment": "", "devices": "devices: ", "state": "state: ",
    "batches": "batches: ", "stages": "the stage from step ", "arguments": "train: ", "lanes": "",
    "programs": "", "config": "config: ", "code": "",
}  # fmt: skip
"""The sections that are compared, and how the names of their values begin."""
_TRACED_STEP = "the traced step"
HASHES = {
    "state: hash": "state: paths, shapes or dtypes of its leaves differ",
    "state: sharding": "state: its leaves are sharded differently",
    "batches: hash": "batches: the definition differs",
    _TRACED_STEP: "the traced step differs",
}
"""Values that show only whether something differs, and the line for each."""
PAIR_WORDS = ("in A", "in B")
RESTART_WORDS = ("before", "now")
"""What the lines call two starts."""

# Sections whose differences change the bits, and sections about where a run is computed. Other
# differences are intended.

_BITS = {"settings", "state", "batches", "lanes", "programs", "config"}
_PLACE = {"versions", "devices", "code"}
_EFFECTS = {"state: sharding": _PLACE, "train: batch_sharding": _PLACE, "batch": set[str]()}
"""Values whose effect is not that of their section."""
_HARMLESS_FLAG = re.compile("dump|log|profil|path|dir|device_count")
PATH_OPTIONS = ("checkpoint_dir", "logdir", "compile_cache", "start_from")
"""The arguments of `train` that are paths."""
_NAMES = dict.fromkeys(
    ("steps", "num_steps", "max_steps", "total_steps", "train_steps"), "last_step"
)
"""Name of an option → the argument of `train` with the same meaning."""
_ADDRESS = re.compile("COORDINATOR|ADDRESS|PORT$|PROCESS_ID")
_PATH = re.compile(r"(~|\.{0,2})[/\\]|[A-Za-z]:[\\/]|\w+://")
_TRACED = {"versions", "devices", "train: batch_sharding"}
"""Sections and values that may change the trace of a step without changing its bits."""
_ABSENT = object()


class RecordedValue(NamedTuple):
    section: str
    value: Any


def values_of(start: Mapping[str, Any]) -> dict[str, RecordedValue]:
    """Return the values of a start that are compared, as name → section and value.

    Paths are left out: moving a run does not change it.
    """
    setup = start.get("setup") or {}
    arguments = setup.get("arguments") or {}
    run_paths: list[str] = []
    for name in PATH_OPTIONS:
        path = arguments.get(name)
        if isinstance(path, str):
            run_paths.append(path)
    parts: dict[str, Any] = {
        **setup,
        "environment": _environment(setup.get("environment") or {}),
        "config": start.get("config"),
        "code": _code(start),
        "lanes": {"lanes": setup.get("lanes")} if "lanes" in setup else {},
        "programs": _programs(setup.get("programs") or ()),
    }
    values: dict[str, RecordedValue] = {}
    for section, begins in SECTIONS.items():
        for name, value in _flat(begins, parts.get(section) or {}):
            if name.removeprefix("train: ").removeprefix("config: ") in PATH_OPTIONS:
                continue
            # The value of an option or variable with another name may be a path, too.
            may_be_path = section in ("config", "environment") and isinstance(value, str)
            if may_be_path and _is_path(value, run_paths):
                continue
            values[name] = RecordedValue(section, value)
    return values


def _environment(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables, with each flag of XLA as a value of its own."""
    values: dict[str, Any] = {}
    for word in str(variables.get("XLA_FLAGS", "")).split():
        name, _, value = word.partition("=")
        values[f"XLA_FLAGS {name}"] = value or "set"
    for name, value in variables.items():
        # In each start of several processes, addresses and ports differ.
        if name != "XLA_FLAGS" and not _ADDRESS.search(name):
            values[name] = value
    return values


def _code(start: Mapping[str, Any]) -> dict[str, str]:
    commit = start.get("commit")
    if commit is None:
        return {}
    edits = start.get("edits")
    suffix = f" with edits {edits} not committed" if edits else ""
    return {"code": f"commit {commit[:8]}{suffix}"}


def _programs(programs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of each program; names of stage 0 have no number."""
    values: dict[str, Any] = {}
    for program in programs:
        stage = program.get("stage")
        suffix = f"[{stage}]" if stage else ""
        for name, value in (program.get("hyperparameters") or {}).items():
            values[f"{name}{suffix}"] = value
        values[f"batch{suffix}"] = program.get("batch")
        values[f"{_TRACED_STEP}{suffix}"] = program.get("hash")
    return values


def _is_path(value: str, run_paths: Collection[str]) -> bool:
    if _PATH.match(value):
        return True
    # A relative path such as "runs/a/plots" cannot be told from another option with a slash, unless
    # it is below a path of the run.
    return "/" in value and any(f"{value}/".startswith(f"{path}/") for path in run_paths)


def _flat(begins: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            # The key of step 0 is omitted, as for the first program.
            inner = {"" if key == "0" else f"[{key}]": entry for key, entry in value.items()}
            yield from _flat(f"{begins}{name}", inner)
        else:
            yield f"{begins}{name}", value


class Changes(NamedTuple):
    """The lines about two starts.

    Attributes:
        bits: Differences that change the bits of a resumed run.
        place: Differences in where it is computed, which may change them.
        others: Intended differences, such as a later last step.
    """

    bits: list[str]
    place: list[str]
    others: list[str]

    @property
    def lines(self) -> list[str]:
        return [*self.bits, *self.place, *self.others]

    def list_of(self, name: str, section: str) -> list[str]:
        """Return the list for the line of a value."""
        effect = _EFFECTS.get(name, {section})
        is_xla_flag = name.startswith("XLA_FLAGS ") and not _HARMLESS_FLAG.search(name)
        if is_xla_flag or effect & _BITS:
            return self.bits
        if effect & _PLACE:
            return self.place
        return self.others


class _Difference(NamedTuple):
    """A value that differs; `old` or `new` is `_ABSENT` if one of the starts does not have it."""

    section: str
    old: Any
    new: Any


def changes(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    words: tuple[str, str] = RESTART_WORDS,
    leave_out: Collection[str] = (),
) -> Changes:
    """Describe what differs between two starts, in sections that both of them have.

    Args:
        words: What the lines call the two.
        leave_out: Sections that are not compared.
    """
    differing = _differing_values(values_of(first), values_of(second), leave_out)
    # A hash shows only that something differs. So we first collect the sections and names of the
    # other differing values, and show a hash only if none of these explains it.
    named: set[str] = set()
    for name, difference in differing.items():
        if name not in HASHES:
            named |= {difference.section, _stem(name)}
    # Batches of other shapes, and other devices of lanes, are traced differently by every step.
    has_lanes = bool((second.get("setup") or {}).get("lanes"))
    is_comparable = "batch" not in named and not ("devices" in named and has_lanes)
    found = Changes([], [], [])
    # The hashes that have a line. Of several programs, only the first one gets a line.
    shown: set[str] = set()
    for name, difference in differing.items():
        section, old, new = difference
        stem = _stem(name)
        if stem in shown or _has_another_line(name, difference, differing, named):
            continue
        lines = found.list_of(stem, section)
        if stem not in HASHES:
            lines.append(f"{name}: {_shown(old, new)} {words[0]}, {_shown(new, old)} {words[1]}")
        elif stem == _TRACED_STEP:
            if not is_comparable:
                continue
            shown.add(stem)
            if _TRACED & named:
                lines = found.place
            lines.append(HASHES[stem] + _how_programs_differ(name, (first, second), words))
        elif not {section, "devices"} & named:  # other devices have other shardings
            shown.add(stem)
            lines.append(HASHES[stem])
    return found


def _has_another_line(
    name: str, difference: _Difference, differing: Mapping[str, _Difference], named: Collection[str]
) -> bool:
    """Return whether the line of another value shows the same difference."""
    if difference.section == "config":
        return _is_argument_of_train(name, difference.old, difference.new, differing)
    if difference.section == "state":
        return "jax_enable_x64" in differing
    # The mesh of a sharding consists of the devices.
    return _stem(name) == "train: batch_sharding" and "devices" in named


def _differing_values(
    first: Mapping[str, RecordedValue],
    second: Mapping[str, RecordedValue],
    leave_out: Collection[str],
) -> dict[str, _Difference]:
    sections_of_first = {value.section for value in first.values()}
    sections_of_second = {value.section for value in second.values()}
    sections = (sections_of_first & sections_of_second) - {*leave_out}
    differing: dict[str, _Difference] = {}
    for name in dict.fromkeys([*first, *second]):
        section = (first.get(name) or second[name]).section
        # A setting has a line of its own, wherever it was set.
        if section not in sections or is_setting(name, section, first):
            continue
        old = first[name].value if name in first else _ABSENT
        new = second[name].value if name in second else _ABSENT
        is_in_both = old is not _ABSENT and new is not _ABSENT
        if not is_in_both and section in ("settings", "programs"):
            # Another version of JAX has other settings, and another stage other programs.
            continue
        if NOT_RECORDED in (old, new) or same(old, new):
            continue
        differing[name] = _Difference(section, old, new)
    return differing


def _is_argument_of_train(
    name: str, old: Any, new: Any, differing: Mapping[str, _Difference]
) -> bool:
    """Return whether an option is also an argument, such as last_step, that differs equally."""
    option = name.removeprefix("config: ").rpartition("/")[2]
    argument = differing.get(f"train: {_NAMES.get(option, option)}")
    return argument is not None and (argument.old, argument.new) == (old, new)


def is_setting(name: str, section: str, values: Collection[str]) -> bool:
    """Return whether an environment variable sets one of the values."""
    return section == "environment" and name.startswith("JAX_") and name.lower() in values


def _how_programs_differ(
    name: str, starts: Sequence[Mapping[str, Any]], words: tuple[str, str]
) -> str:
    """Describe in which part two programs differ, by which optimizers, and in which lines.

    Return "" if that is not known.
    """
    stage = name.partition("[")[2].rstrip("]") or "0"
    first, second = (_program_at(stage, start) for start in starts)
    parts: list[str] = []
    for key, part in _PARTS.items():
        if first.get(key) and second.get(key) and first[key] != second[key]:
            parts.append(part)
    clauses = [f"in its {' and its '.join(parts)}"] if parts else []
    optimizer = first.get("optimizer")
    other = second.get("optimizer")
    # Values of hyperparameters have lines of their own.
    are_named = _differ_in_hyperparameters(first, second)
    if None not in (optimizer, other) and optimizer != other and not are_named:
        clauses.append(f"{optimizer} {words[0]}, {other} {words[1]}")
    if are_named and parts == [_PARTS["update"]]:
        return f" ({clauses[0]})"  # the lines of the programs would only repeat them
    texts = [read_programs(str(start.get("programs", ""))).get(stage, "") for start in starts]
    if all(texts):
        settings = [(start.get("setup") or {}).get("settings") or {} for start in starts]
        implementations = {str(values.get(_PRNG)) for values in settings}
        clauses += differing_lines(*texts, any_keys=len(implementations) > 1)
    return f" ({'; '.join(clauses)})" if clauses else ""


_PARTS = {"gradients": "loss and gradients", "update": "update"}
"""Key of a program's hash → the part of the program that is hashed."""


def _differ_in_hyperparameters(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two programs have one optimizer, with other values of hyperparameters."""
    old = first.get("hyperparameters") or {}
    new = second.get("hyperparameters") or {}
    values: dict[str, set[str]] = {}
    for name in old.keys() & new.keys():
        # The text of an optimizer shows the last part of the path. Several optimizers may have a
        # hyperparameter of this name.
        shown = values.setdefault(name.rpartition("/")[2], set())
        shown.add(_value_text(old[name]))
        shown.add(_value_text(new[name]))

    def erase_value(match: re.Match[str]) -> str:
        if match[2] in values.get(match[1], ()):
            return f"{match[1]}="
        return match[0]

    # In one pass, not in one for each name: somebody else's setup may have ten thousand names.
    old_text = _ARGUMENT.sub(erase_value, first.get("optimizer") or "")
    new_text = _ARGUMENT.sub(erase_value, second.get("optimizer") or "")
    return old != new and old_text == new_text


_ARGUMENT = re.compile(r"\b(\w++)=([^,()=]++)(?=[,)])")
"""An argument in the text of an optimizer."""


def _value_text(value: object) -> str:
    if isinstance(value, float):
        value = shortest_digits(value)
    return str(value)


def _program_at(stage: str, start: Mapping[str, Any]) -> Mapping[str, Any]:
    for program in (start.get("setup") or {}).get("programs") or ():
        if str(program.get("stage") or 0) == stage:
            found: Mapping[str, Any] = program
            return found
    return {}


def _stem(name: str) -> str:
    return name.partition("[")[0]


def same(a: Any, b: Any) -> bool:
    if a is _ABSENT or b is _ABSENT:
        return a is b
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _shown(value: Any, other: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, float) and isinstance(other, float):
        digits = shortest_digits(value)
        # All digits are shown if these do not show the difference.
        if digits != shortest_digits(other):
            value = digits
    # A string has quotes only if it is empty, or would look like the other value: "1" and 1.
    if isinstance(value, str) and value and str(other) != value:
        return truncate(value, 80)
    return truncate(json.dumps(value), 80)


# The first lines in which two printed programs differ.

_MAX_LINES = 5
"""The maximum number of lines that are shown."""
_COMPARED = 400
"""The maximum number of lines that are compared, from the first difference on."""
_MAX_SHOWN = 60
"""The maximum number of characters of a line that are shown."""
_BOUND = re.compile(r"\b([a-z]+):(?=[a-z]+\d*(?:<\w+>)?\[)")
_WORD = re.compile(r"(= )?\b([a-z]{1,4})\b(?![=<\[])(:)?")
_KEY = re.compile(r"\bkey<\w+>")


def differing_lines(old_program: str, new_program: str, *, any_keys: bool = False) -> list[str]:
    """Return the first lines in which two programs differ, without the names of their variables.

    With `any_keys`, PRNG keys of all implementations are equal.
    """
    if any_keys:
        old_program = _KEY.sub("key", old_program)
        new_program = _KEY.sub("key", new_program)
    old = _erase_names(old_program)
    new = _erase_names(new_program)
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    # Not all lines that follow: difflib takes quadratic time.
    replaced = _replaced(old[first : first + _COMPARED], new[first : first + _COMPARED])
    return list(dict.fromkeys(replaced))[:_MAX_LINES]


def _replaced(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, old_start, old_stop, new_start, new_stop in matcher.get_opcodes():
        if kind == "equal":
            continue
        old_lines = old[old_start:old_stop]
        new_lines = new[new_start:new_stop]
        for old_line, new_line in itertools.zip_longest(old_lines, new_lines, fillvalue=""):
            if old_line or new_line:
                old_text = truncate(old_line, _MAX_SHOWN) or "nothing"
                new_text = truncate(new_line, _MAX_SHOWN) or "nothing"
                yield f"{old_text} → {new_text}"


def _erase_names(text: str) -> list[str]:
    names = set(_BOUND.findall(text))

    def erase(word: Any) -> str:
        return word[0] if word[1] or word[2] not in names else ""

    return [" ".join(_WORD.sub(erase, line).split()) for line in text.split("\n")]
