"""The card of a run and of its programs: what it is made of, its record, and the observer that writes it."""

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.checks import cut
from jstep.core.meshes import in_background, mesh_of
from jstep.core.programs import ProgramHash, digest_of, mesh_text, program_hash, sharding_text, without_addresses
from jstep.data.batches import definition_of, rows_hash
from jstep.data.sequence import BatchSequence, StateBatches
from jstep.data.to_devices import ReplayedBatches
from jstep.hooks.hook import key_of
from jstep.loop.calls import Call
from jstep.loop.compiler import shapes_of, type_text
from jstep.loop.run_record import Options, Run
from jstep.loop.stages import TrainSteps, lanes_of, name_of_step
from jstep.optimizers.leafwise import RULE

# Run cards: a record of the versions, devices, arguments and programs of a run, for comparison with other runs.

PLACES = ("checkpoint_dir", "logdir", "compile_cache")
"""Arguments that name the directories of a run: recorded, never compared."""

_LONGEST = 1000
"""The maximum length of a part of a definition, in characters of JSON; a longer one is replaced by its hash."""
_MOST_NUMBERS = 200

_SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_LOGIN = re.compile(r"(\w://)[^/@\s]*@")
_QUERY = re.compile(r"(\w://[^?\s]*)\?\S*")
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""Settings of JAX that change numerical results, wherever they were set."""


def card(
    options: Options, stages: TrainSteps, step: int, state: Any, held: Mapping[str, float], batches: Any
) -> dict[str, Any]:
    """Return the card of a run, without its programs, as JSON values.

    Args:
        options: The arguments of `train`.
        stages: The training steps.
        step: The step at which the run begins.
        state: The shapes of its state.
        held: Name → initial value of the held hyperparameters.
        batches: The argument of `train`.
    """
    lanes = {str(stage.first): lanes_of(stage.value) for stage in stages.stages()}
    return {
        "card": 1,
        "step": step,
        "versions": _versions(),
        "environment": environment(),
        "settings": _settings(),
        "devices": _devices(state),
        "state": _state(state, held),
        "batches": _batches(batches),
        "stages": {str(stage.first): name_of_step(stage.value) for stage in stages.stages()},
        "lanes": lanes if len(set(lanes.values())) > 1 else next(iter(lanes.values())),
        "arguments": _arguments(options),
    }


def program_card(traced: Any, constants: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return the record of a program, as JSON values.

    Args:
        traced: Its trace, a `jax.stages.Traced`, or None for a function that is not compiled.
        constants: Metrics that no step computes: the hyperparameters that are plain numbers, by name.
        args: The batch of a call.
    """
    batch = [f"{path or 'batch'}: {type_text(leaf)}" for path, leaf in trees.leaves_with_paths(args)]
    found: dict[str, Any] = {"batch": short(batch), "hyperparameters": {k: _json(v) for k, v in constants.items()}}
    if traced is None:
        return {"hash": None, **found}
    hashed: ProgramHash = program_hash(traced.jaxpr)
    numbers = dict(sorted(hashed.numbers.items())) if len(hashed.numbers) <= _MOST_NUMBERS else None
    found["optimizer"] = [name.removesuffix(RULE) for name in hashed.functions if name.endswith(RULE)]
    return {"hash": hashed.digest, **found, "operations": dict(sorted(hashed.operations.items())), "numbers": numbers}


def _versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that a run depends on."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "jstep": str(sys.modules["jstep"].__version__),
    }
    for name in ("jax", "jaxlib", "orbax-checkpoint"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # such as a checkout on the path
            found[name] = getattr(sys.modules.get(name), "__version__", None)
    return found


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables `XLA_FLAGS` and `JAX_*`, and no others; values that look like passwords are omitted."""
    names = [name for name in sorted(variables) if name == "XLA_FLAGS" or name.startswith("JAX_")]
    return {name: "(not recorded)" if _SECRET.search(name) else _without_login(variables[name]) for name in names}


def _without_login(text: str) -> str:
    """A path or an address without the user name, password or signature that a URL may hold."""
    return _QUERY.sub(r"\1", _LOGIN.sub(r"\1", text))


def _settings() -> dict[str, Any]:
    """The settings of JAX that change what is computed."""
    found = {name: getattr(jax.config, name, None) for name in _SETTINGS}
    return {name: value if isinstance(value, bool | None) else str(value) for name, value in found.items()}


def _devices(state: Any) -> dict[str, Any]:
    """The devices of a run and the mesh of its state."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)]
    of_state = next((leaf.sharding.device_set for leaf in leaves if leaf.sharding is not None), set())
    first = min(of_state or jax.devices(), key=lambda device: device.id)
    mesh = mesh_of(state)
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(first.platform),
        "of_state": max(len(of_state), 1),
        "processes": jax.process_count(),
        "mesh": None if mesh is None else mesh_text(mesh),
    }


def _state(state: Any, held: Mapping[str, float]) -> dict[str, Any]:
    leaves = trees.leaves_with_paths(shapes_of(state))
    described = [f"{path} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]
    where = [
        f"{path} {'anywhere' if leaf.sharding is None else sharding_text(leaf.sharding)}"
        for path, leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    dtypes = collections.Counter(str(leaf.dtype) for _, leaf in leaves)
    return {
        "hash": digest_of(*described),
        "sharding": digest_of(*where),
        "params": sum(math.prod(leaf.shape) for path, leaf in leaves if path.split("/")[0] == "params"),
        "leaves": len(leaves),
        "dtypes": dict(sorted(dtypes.items())),
        "slots": sorted(state.slots or ()),
        "held": {name: _json(value) for name, value in held.items()},
    }


def _batches(batches: Any) -> dict[str, Any]:
    if isinstance(batches, BatchSequence):
        found = definition_of(batches)
    else:
        made = batches.make if isinstance(batches, ReplayedBatches | StateBatches) else batches
        named = made if isinstance(getattr(made, "__qualname__", None), str) else type(made)
        # A generator has the name of its function, but no module.
        module = getattr(named, "__module__", None) or type(made).__name__
        found = {"kind": f"{module}.{named.__qualname__}"}
        try:
            found["length"] = len(batches)
        except Exception:  # a user-defined loader: it is endless, or its length is not known
            found["length"] = None
    return {"hash": digest_of(json.dumps(found, sort_keys=True)), **{key: short(part) for key, part in found.items()}}


def _arguments(options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value: Any = options.end if field.name == "last_step" else getattr(options, field.name)
        if field.name == "hooks":
            found["hooks"] = [without_addresses(key_of(hook)) for hook in value]
        elif isinstance(value, Saver):
            found[field.name] = _without_login(value.directory)
        elif field.name in PLACES:
            is_place = not isinstance(value, bool | None)  # compile_cache=True
            found[field.name] = _without_login(os.fspath(value)) if is_place else value
        elif field.name == "batch_sharding":
            found[field.name] = short([_place_text(one) for one in jax.tree.leaves(value, is_leaf=_is_place)]) or None
        else:
            found[field.name] = _json(value)
    return found


def _is_place(x: Any) -> bool:
    return isinstance(x, Sharding | PartitionSpec)


def _place_text(one: Any) -> str:
    return sharding_text(one) if isinstance(one, Sharding) else str(one)


def short(value: Any) -> Any:
    """Return a JSON value, or its hash if it is long."""
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= _LONGEST else f"hash {digest_of(text)}"


def _json(value: Any) -> Any:
    """Convert a value to JSON: numbers, strings and None unchanged, arrays to lists, other objects to strings."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.floating):  # float32 0.1 is recorded as 0.1, not 0.10000000149011612
        value = float(str(value))
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_json(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return value if isinstance(value, bool | int) else without_addresses(str(value))


# Describe the differences between the cards of two runs.

_SECTIONS = {
    "versions": "",
    "settings": "",
    "environment": "",
    "devices": "devices: ",
    "state": "state: ",
    "batches": "batches: ",
    "stages": "",
    "arguments": "train: ",
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
_PLACE = re.compile(r"/|\\|^\[?[\w.:-]+\]?:\d+$")
_NAME_OF_PLACE = re.compile(r"(DIR|PATH|FILE|ADDRESS|ADDR|HOST|URL)$")


def card_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two cards, one per line. Paths and addresses are not compared.

    Args:
        a: The card of a run, from the `card` lines of its timeline.
        b: The card of another run.

    Returns:
        The differences; empty if the cards are equal.

    Example:
        >>> from jstep.loop.card import card_difference
        >>> card_difference({"batches": {"seed": 0, "rows": 100}}, {"batches": {"seed": 1, "rows": 100}})
        ['batches: seed: 0 in A, 1 in B']
    """
    found: list[str] = []
    for section, begins in _SECTIONS.items():
        one, other = _values(a, section), _values(b, section)
        if section == "environment":
            one, other = _without_places(one, other)
        lines = list(differences("", one, other))
        one, other = _section(a, section), _section(b, section)
        for name, line in _HASHES.get(section, {}).items():
            # A hash adds to other lines only if it is that of the sharding, and the leaves are otherwise the same.
            adds = one.get("hash") == other.get("hash") if name == "sharding" else not lines
            if adds and one.get(name) != other.get(name):
                lines.append(line)
        found += [begins + line for line in lines]
    return [*found, *differences("lanes", a.get("lanes"), b.get("lanes")), *_programs(a, b)]


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
        return {f"XLA_FLAGS {name}": value or "set" for name, _, value in flags} | found
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


def differences(name: str, a: Any, b: Any, runs: tuple[str, str] = ("in A", "in B")) -> Iterator[str]:
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


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    return cut(value if isinstance(value, str) and value else json.dumps(value), _LONGEST_VALUE)


def _programs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Compare the programs that both runs have."""
    in_a, in_b = _by_call(a), _by_call(b)
    same_batches = _section(a, "batches") == _section(b, "batches")
    for key in sorted(in_a.keys() & in_b.keys()):
        one, other = in_a[key], in_b[key]
        same_shapes = one.get("batch") == other.get("batch")
        if not same_shapes:
            if same_batches and "rows" in _section(a, "batches"):
                continue  # one run began at a step with another batch size
            yield from differences("batch", one.get("batch"), other.get("batch"))
        if None not in (one.get("optimizer"), other.get("optimizer")):
            yield from differences("step: optimizer", one["optimizer"], other["optimizer"])
        rates = differences("", _section(one, "hyperparameters"), _section(other, "hyperparameters"))
        yield from (f"step: {line}" for line in rates)
        if None not in (one.get("hash"), other.get("hash")) and one["hash"] != other["hash"]:
            stage, steps = key
            name = _section(a, "stages").get(str(stage), "train_step")
            call = f", {steps} steps a call" if steps > 1 else ""
            traced = f"step: the traced {name} (stage from step {stage}{call})"
            if same_shapes:
                yield f"{traced} differs: {_why(one, other)}"
            elif operations := _counts("operations", one, other):
                yield f"{traced} differs, on batches of different shapes: {operations}"
            else:
                yield f"{traced} has the same operations; its numbers were not compared, as the batches differ in shape"


def _by_call(card: Mapping[str, Any]) -> dict[tuple[int, int], Mapping[str, Any]]:
    programs = card.get("programs")
    return {
        (one["stage"], one["steps"]): one
        for one in (programs if isinstance(programs, list) else ())
        if isinstance(one, Mapping) and type(one.get("stage")) is int and type(one.get("steps")) is int
    }


def _why(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    parts = [part for what in ("numbers", "operations") if (part := _counts(what, a, b))]
    return "; ".join(parts) or "the same numbers and operations, in another order or on other shapes and constants"


def _counts(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The numbers or operations that the programs have in different counts; empty if there are none."""
    one, other = _section(a, what), _section(b, what)
    changed = [name for name in _names(one, other) if one.get(name, 0) != other.get(name, 0)]
    some = ", ".join(f"{name} ({one.get(name, 0)} in A, {other.get(name, 0)} in B)" for name in changed[:_MOST])
    more = f" and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
    return f"{what} {some}{more}" if changed else ""


# The past of a checkpoint, its batches and optimizers, and the warning if a resumed run has others.

PAST = "past"
"""The key of a checkpoint's `extra`."""

_logger = logging.getLogger("jstep")


def past_of(batches: Any, step: int, optimizers: Mapping[str, str], lanes: int | None = None) -> dict[str, Any]:
    """Return a record of the run before a checkpoint, to be kept with it, as JSON values.

    Args:
        batches: The argument of `train`.
        step: The step of the checkpoint.
        optimizers: First step of a stage → the names of the optimizer's rules.
        lanes: The number of lanes of the last step before the checkpoint.
    """
    found: dict[str, Any] = {"optimizers": dict(optimizers), "lanes": lanes}
    if isinstance(batches, BatchSequence):
        before = batches[:step]
        definition = {name: short(part) for name, part in definition_of(before).items() if name != "num_epochs"}
        found |= {"rows": rows_hash(before), "batches": definition}
    return found


def warn_if_past_changed(step: int, name: str, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log a warning if the batches before a checkpoint, the optimizer or the lanes differ from those of its run.

    Args:
        step: The step of the checkpoint.
        name: Its name.
        kept: The value of `past_of` when it was saved.
        now: The value of `past_of` for the batches of this run and the optimizer of its first program.
    """
    for stage, optimizer in now["optimizers"].items():
        if kept["optimizers"].get(stage, optimizer) != optimizer:
            _logger.warning(
                "train_step: %s was trained by the optimizer %s, and this run continues with %s on the same slots. To "
                "start with fresh slots, restore the parameters alone: Saver.restore_params.",
                name,
                kept["optimizers"][stage],
                optimizer,
            )
    if step and kept.get("lanes") != now["lanes"]:
        _logger.warning(
            "lanes=%s: %s was trained with lanes=%s; from step %d on the bits are not those of a run with either value",
            now["lanes"],
            name,
            kept.get("lanes"),
            step,
        )
    if "rows" in kept and "rows" in now and kept["rows"] != now["rows"]:
        _logger.warning(
            "batches: those before step %d are not the ones that %s was trained on: %s. The run continues with batch "
            "%d of the new definition, so rows may be repeated or left out.",
            step,
            name,
            "; ".join(_changes(kept["batches"], now["batches"])),
            step,
        )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if then["kind"] != now["kind"]:
        then, now = {"kind": then["kind"]}, {"kind": now["kind"]}
    found = list(differences("", then, now, ("then", "now")))
    return found or ["their definition is the same, but it takes other rows in this version of jstep"]


# The observer that records the card of a run and its programs, in a background thread.


class Cards(contextlib.AbstractContextManager["Cards"]):
    """Writer of the card of a run, and of a line for each program once its first call was dispatched.

    The lines are those of the timeline; without one, nothing is written. Background threads write them, in order; the
    thread of the loop only looks up traces in JAX's cache. Errors are logged and never end the run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        run.at_beginning.append(self.begun)
        run.pasts.append(self.past)
        self._batches: Any = None
        self._optimizers: dict[str, str] = {}  # by the first step of the stage
        self._kept: dict[str, Any] | None = None  # the past of the restored checkpoint, until it was compared
        self._latest: list[Future[None]] = []

    def begun(self, batches: Any) -> None:
        """Write the card, and wait for the programs."""
        run, self._batches = self.run, batches
        if run.write_line is None:
            return
        self._write = functools.partial(run.write_line, "card")
        run.programs.after_first.append(self._add_program)
        if run.restored and isinstance(kept := run.extra.get(PAST), dict):
            self._kept = kept
        given = run.options, run.stages, run.first, shapes_of(run.state), run.held, batches
        self._begin(lambda: self._write(**card(*given), programs=[]))

    def _add_program(self, call: Call, state: Any) -> None:
        """Record a program that was called for the first time."""
        with _logging_errors():
            program, traced, args = call.program, call.trace(state), call.of_one
            about, constants = {"stage": program.stage.first, "steps": program.most}, program.constants.arrays
            self._begin(lambda: self._record(about | program_card(traced, constants, args)))

    def past(self, step: int) -> dict[str, Any]:
        """Return the past to keep with a checkpoint of this step, as `{PAST: …}`; it waits for pending lines."""
        run, found = self.run, {}
        if run.feeder is None:  # no step was run: it has not changed
            return {PAST: run.extra[PAST]} if PAST in run.extra else {}
        if run.write_line is not None:
            self._settle()
            with _logging_errors():
                found[PAST] = self._past(step)
        return found

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._settle()

    def _settle(self) -> None:
        """Wait for pending lines."""
        wait(self._latest)

    def _begin(self, task: Callable[[], None]) -> None:
        """Run a task in a thread, after the earlier tasks."""
        before = self._latest

        def run() -> None:
            wait(before)
            with _logging_errors():
                task()

        self._latest = [in_background(run, name="jstep-card")]

    def _record(self, program: dict[str, Any]) -> None:
        if program.get("optimizer"):
            self._optimizers[str(program["stage"])] = ", ".join(program["optimizer"])
        self._write(programs=[program])
        kept, self._kept = self._kept, None
        if kept is not None and (step := self.run.restored) is not None:
            warn_if_past_changed(step, checkpoint_name(self.run.saver.prefix, step), kept, self._past(step))

    def _past(self, step: int) -> dict[str, Any]:
        return past_of(self._batches, step, self._optimizers, lanes_of(self.run.stages.at(max(step - 1, 0))))


@contextlib.contextmanager
def _logging_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _logger.warning("the card of this run could not be recorded: %s: %s", type(error).__name__, error)
