"""Run cards: a record of the versions, devices, arguments and programs of a run, and the observer that writes it."""

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
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.jaxprs import ProgramHash, gradients_hash, hash_strings, part_for, program_hash, without_addresses
from jstep.core.logs import BELOW_BAR
from jstep.core.meshes import internal_transfers, sharding_text
from jstep.core.recorded_calls import as_typed, named_optimizers
from jstep.core.records import json_of
from jstep.core.secret_values import NOT_RECORDED, hide_value, is_secret, without_login
from jstep.core.tables import printable
from jstep.core.threads import in_background
from jstep.data.loaders import ReplayedBatches, StateBatches
from jstep.data.sequence import BatchSequence
from jstep.hooks import card_differences, cards
from jstep.hooks.card_differences import BEFORE_AND_NOW, Changes, differences
from jstep.hooks.cards import NOT_READY, SETTINGS
from jstep.hooks.states import hook_key
from jstep.loop import given
from jstep.loop.arguments import Options
from jstep.loop.branch import PARENT
from jstep.loop.calls import Call
from jstep.loop.compiler import shapes_of, type_text
from jstep.loop.dispatch import Dispatch
from jstep.loop.run import Observer, Origin
from jstep.loop.setup import Setup
from jstep.loop.stages import TrainSteps, lanes_of, name_of_step
from jstep.optimizers.rules import RULE
from jstep.state.sharding import describe_devices
from jstep.stores.repository import GIT_TIMEOUT_SECS, code_version
from jstep.stores.timeline import CODE, CONFIG, START
from jstep.training.metrics import LOSS, StepMetrics
from jstep.training.step import step_function

# The contents of a card, for comparison with other runs.

_MAX_LENGTH = 1000
"""The maximum length of an entry, in characters of JSON; a longer one is replaced by its hash."""
_MAX_NUMBERS = 200
_OF_ANY_LENGTH = "x" * 16
"""In the place of a variable's value: JAX has none whose value matters and whose name is that of a key or token."""
_CONFIG_SECS = 10.0
"""The seconds for which the end of a run waits for the record of a config that takes long."""


def card(
    options: Options, stages: TrainSteps, step: int, state: Tree, held: Mapping[str, float], batches: Tree
) -> dict[str, Any]:
    """Return the card of a run as JSON, without its programs."""
    lanes = {str(stage.first): lanes_of(stage.value) for stage in stages.stages()}
    return {
        "card": cards.VERSION,
        "step": step,
        "versions": _versions(),
        "environment": environment(),
        "settings": _settings(),
        "devices": describe_devices(state),
        "state": _state(state, held),
        "batches": _batches(batches),
        "stages": {str(stage.first): name_of_step(stage.value) for stage in stages.stages()},
        "lanes": lanes if len(set(lanes.values())) > 1 else next(iter(lanes.values())),
        "arguments": _arguments(options),
        **({} if options.config is None else {CONFIG: dict(options.config)}),
        "argv": given.command_line(),
    }


def program_card(traced: Any, constants: Mapping[str, Any], args: Any, optimizer: object = None) -> dict[str, Any]:
    """Return the record of a program; `constants` are the hyperparameters that are plain numbers."""
    batch = [f"{path or 'batch'}: {type_text(leaf)}" for path, leaf in trees.leaves_with_paths(args)]
    record: dict[str, Any] = {"batch": short(batch), "hyperparameters": {k: json_of(v) for k, v in constants.items()}}
    if optimizer is not None:
        elements = named_optimizers(optimizer)
        record["elements"] = {name: {k: _or_type(_argument, v) for k, v in of.items()} for name, of in elements.items()}
    if traced is None:
        return {"hash": None, **record}
    step = part_for(traced.jaxpr, _results_with_bits(*traced.out_info))
    hashed: ProgramHash = program_hash(step)
    record["optimizer"] = [name.removesuffix(RULE) for name in hashed.functions if name.endswith(RULE)]
    return record | _hash_card(hashed) | {"gradients": _hash_card(gradients_hash(step))}


def _results_with_bits(state: Tree, metrics: Any, *others: object) -> list[bool]:
    """Return, for each result of a program, whether the bits of the run depend on it: of the metrics, only the loss."""
    parts = metrics.computed if isinstance(metrics, StepMetrics) else metrics
    if isinstance(parts, dict):
        parts = {name: jax.tree.map(lambda _, name=name: name == LOSS, part) for name, part in parts.items()}
    else:
        parts = jax.tree.map(lambda _: True, parts)
    state, others = jax.tree.map(lambda _: True, (state, others))
    return [*jax.tree.leaves(state), *jax.tree.leaves(parts), *jax.tree.leaves(others)]


def _hash_card(hashed: ProgramHash) -> dict[str, Any]:
    numbers = dict(sorted(hashed.numbers.items())) if len(hashed.numbers) <= _MAX_NUMBERS else None
    return {"hash": hashed.digest, "operations": dict(sorted(hashed.operations.items())), "numbers": numbers}


def _argument(value: object) -> Any:
    """Return an argument of an optimizer as a number or source text."""
    if isinstance(value, trees.Held):  # its value is in the state
        return f"held({value.name!r})"
    if isinstance(value, jax.Array) and (trees.is_key(value) or value.size == 1):
        with internal_transfers():
            return json_of(value)
    if isinstance(value, bool | int | float | np.generic | None):
        return json_of(value)
    text = as_typed(value)
    is_named = callable(value) and text == getattr(value, "__name__", None)
    return {"function": text} if is_named else text


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "jstep": str(sys.modules["jstep"].__version__),
    }
    for name in ("jax", "jaxlib", "orbax-checkpoint"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # such as a checkout on the path
            versions[name] = getattr(sys.modules.get(name), "__version__", None)
    return versions


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `XLA_FLAGS` and `JAX_*` without secrets."""
    names = [name for name in sorted(variables) if name == "XLA_FLAGS" or name.startswith("JAX_")]
    return {
        name: NOT_RECORDED if is_secret(name, _OF_ANY_LENGTH) else hide_value(name, variables[name]) for name in names
    }


def _settings() -> dict[str, Any]:
    settings = {name: getattr(jax.config, name, None) for name in SETTINGS}
    return {name: value if isinstance(value, bool | None) else str(value) for name, value in settings.items()}


def _state(state: Tree, held: Mapping[str, float]) -> dict[str, Any]:
    leaves = trees.leaves_with_paths(shapes_of(state))
    described = [f"{path} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]
    where = [
        f"{path} {'anywhere' if leaf.sharding is None else sharding_text(leaf.sharding)}"
        for path, leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    dtypes = collections.Counter(str(leaf.dtype) for _, leaf in leaves)
    return {
        "hash": hash_strings(*described),
        "sharding": hash_strings(*where),
        "params": sum(math.prod(leaf.shape) for path, leaf in leaves if path.split("/")[0] == "params"),
        "leaves": len(leaves),
        "dtypes": dict(sorted(dtypes.items())),
        "slots": sorted(state.slots or ()),
        "held": {name: json_of(value) for name, value in held.items()},
    }


def _batches(batches: Tree) -> dict[str, Any]:
    if isinstance(batches, BatchSequence):
        definition = batches.definition()
    else:
        source = batches.make if isinstance(batches, ReplayedBatches | StateBatches) else batches
        named = source if isinstance(getattr(source, "__qualname__", None), str) else type(source)
        # A generator has the name of its function, but no module.
        module = getattr(named, "__module__", None) or type(source).__name__
        definition = {"kind": f"{module}.{named.__qualname__}"}
        try:
            definition["length"] = len(batches)
        except Exception:  # a user-defined loader: it is endless, or its length is not known
            definition["length"] = None
    return {
        "hash": hash_strings(json.dumps(definition, sort_keys=True)),
        **{key: short(part) for key, part in definition.items()},
    }


def _arguments(options: Options) -> dict[str, Any]:
    def recorded(name: str, value: Any) -> Any:
        if isinstance(value, Saver):
            return without_login(value.directory)
        if name == "hooks":
            return [_or_type(lambda hook: without_addresses(hook_key(hook)), hook) for hook in value]
        if name in cards.PLACES:
            return value if isinstance(value, bool | None) else without_login(os.fspath(value))  # compile_cache=True
        if name == "batch_sharding":
            leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
            texts = [sharding_text(leaf) if isinstance(leaf, jax.sharding.Sharding) else str(leaf) for leaf in leaves]
            return short(texts) or None
        return json_of(value)

    arguments = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {
        name: _or_type(functools.partial(recorded, name), value) for name, value in arguments.items() if name != CONFIG
    }


def _or_type(record: Callable[[Any], Any], value: Any) -> Any:
    """Return the record of an argument; its type if it cannot be recorded, which must not cost the card."""
    try:
        return record(value)
    except Exception:
        return json_of(type(value))


def short(value: object) -> Any:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= _MAX_LENGTH else f"hash {hash_strings(text)}"


# The past of a checkpoint, that is, its batches and optimizers, and the changes that a resumed run reports.

PAST = "past"
"""A key of a checkpoint's `extra`, like CONFIG and CODE."""

_logger = logging.getLogger("jstep")


def record_past(batches: Tree, step: int, optimizers: Mapping[str, str], lanes: int | None = None) -> dict[str, Any]:
    """Return a record of the run before a checkpoint; `optimizers` has the rules by first step of a stage."""
    past: dict[str, Any] = {"optimizers": dict(optimizers), "lanes": lanes}
    if isinstance(batches, BatchSequence):
        before = batches[:step]
        definition = {name: short(part) for name, part in before.definition().items() if name != "num_epochs"}
        past |= {"rows": before.rows_hash(), "batches": definition}
    return past


def past_changes(
    step: int, name: str, kept: Mapping[str, Any], now: Mapping[str, Any], *, optimizers: bool = True
) -> list[str]:
    """Describe how the batches before a checkpoint, the optimizer or the lanes have changed since.

    Args:
        optimizers: Whether to compare the optimizers; otherwise the cards do.
    """
    changes: list[str] = []
    for stage, optimizer in now["optimizers"].items() if optimizers else ():
        before = kept.get("optimizers", {}).get(stage, optimizer)
        changes += differences("step: optimizer", before, optimizer, BEFORE_AND_NOW)
    if step:
        lines = differences("lanes", kept.get("lanes"), now["lanes"], BEFORE_AND_NOW)
        changes += [f"{line}; from step {step} on the bits are not those of a run with either value" for line in lines]
    if "rows" in kept and "rows" in now and kept["rows"] != now["rows"]:
        changes.append(
            f"batches: those before step {step} are not the ones that {name} was trained on: "
            f"{'; '.join(_changes_of_batches(kept['batches'], now['batches']))}. The run continues with batch {step} "
            "of the new definition, so rows may be repeated or left out."
        )
    return changes


def _changes_of_batches(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if then["kind"] != now["kind"]:
        then, now = {"kind": then["kind"]}, {"kind": now["kind"]}
    changes = list(differences("", then, now, BEFORE_AND_NOW))
    return changes or ["their definition is the same, but it takes other rows in this version of jstep"]


def report_changes(name: str, changes: Changes, *, is_idle: bool = False) -> None:
    """Log the changes since a checkpoint: a warning if its bits change, else an INFO line."""
    bits, place = (list(map(printable, lines)) for lines in changes)
    if bits:
        lines = "".join(f"\n  {line}" for line in (*bits, *place, *[_UNTRAINED] * is_idle))
        _logger.warning("%s: this run has changed since the start that made it:%s", name, lines, extra=BELOW_BAR)
    elif place:
        _logger.info("%s: since the start that made it, %s", name, "; ".join(place))


_UNTRAINED = "none of this was trained, as the run takes no step: give another checkpoint_dir, or a larger last_step"


# The observer that records the card and the programs, in background threads.


_CODE_SECS = GIT_TIMEOUT_SECS + 0.5
"""The maximum time to wait for the commit; git is ended before."""


class Cards(Observer):
    """Writer of the card of a run, and of a line for each program once its first call was dispatched.

    A run that resumes is compared with the start that made its checkpoint. Background threads do this, in order; the
    loop's thread only looks up traces in JAX's cache. Errors are logged, never raised.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._batches: Any = None
        self._saver: Saver | None = None
        self._origin = Origin()
        self._card: dict[str, Any] | None = None
        self._optimizers: dict[str, str] = {}  # by the first step of the stage
        self._kept: dict[str, Any] | None = None  # the past of the restored checkpoint, until it is compared
        self._latest: list[Future[None]] = []
        self._code: Future[dict[str, Any] | None] | None = None
        self._code_by = math.inf
        self._is_config_late = False  # it was not ready, and has no line of its own yet
        self._reports: list[Future[None]] = []  # of changes; they wait for the commit

    def opened(self, saver: Saver | None, origin: Origin) -> None:
        """Begin to ask git, also for a start that will be refused."""
        self._saver, lines = saver, self.setup.lines

        def find() -> dict[str, Any] | None:
            code = code_version()
            if code is not None:
                lines.write(CODE, **code)
            return code

        if self._is_active():
            self._code_by = time.monotonic() + _CODE_SECS
            self._code = in_background(find, name="jstep-code", daemon=True)

    def restored(self, saver: Saver | None, origin: Origin, dispatch: Dispatch, batches: Tree) -> None:
        self._batches, self._origin, self._stage_of = batches, origin, dispatch.table.stage_of
        if not self._is_active():
            return
        if origin.restored is not None and isinstance(kept := origin.extra.get(PAST), dict):
            self._kept = kept
        setup, loop = self.setup, self.setup.loop
        made_of = setup.options, setup.train_steps, loop.first, shapes_of(loop.state), origin.held, batches

        def record() -> None:
            self._card = {**card(*made_of), PARENT: origin.parent, "programs": []}
            setup.lines.write("card", **self._card)

        self._begin(record)
        self._is_config_late = NOT_READY in (setup.options.config or {}).values()

    def _is_active(self) -> bool:
        """Whether this process records the run: only process 0, and only if the run saves anything."""
        return jax.process_index() == 0 and (self.setup.lines.timeline is not None or self._saver is not None)

    def after_first(self, call: Call, state: Tree) -> None:
        if not self._is_active():
            return
        with _logging_errors():
            program, traced, args = call.program, call.trace(state), call.step_args
            about, pure = {"stage": program.stage.first, "steps": program.max_steps}, step_function(program.stage.step)
            made_of = traced, program.constants.values, args, None if pure is None else pure.optimizer
            self._begin(lambda: self._record(about | program_card(*made_of)))

    def idle(self, shapes: Callable[[int], Any]) -> None:
        """Compare a start that takes no step with the start that made its checkpoint."""
        if self._kept is None:
            return
        loop = self.setup.loop
        last = max(loop.first - 1, 0)
        stage, state = self._stage_of(last), shapes_of(loop.state)

        def record() -> None:
            args = traced = None
            with contextlib.suppress(Exception):  # there is no batch, or it does not fit the step
                args = shapes(last)
                traced = None if args is None else stage.trace(state, args)
            pure = step_function(stage.step)
            about = {"stage": stage.first, "steps": 1}
            self._record(about | program_card(traced, {}, args, None if pure is None else pure.optimizer), is_idle=True)

        self._begin(record)

    def checkpoint_extra(self, step: int) -> dict[str, Any]:
        """Return the past to save with a checkpoint, as `{PAST: …}`; wait for pending lines."""
        kept, extra = dict[str, Any](), self._origin.extra
        if step <= self.setup.loop.first and (self.setup.loop.is_restored or PAST in extra):  # no step was run
            return {key: extra[key] for key in (PAST, CONFIG, CODE) if key in extra}
        if self._is_active():
            wait(self._latest)
            with _logging_errors():
                kept[PAST] = self._past(step)
            if (config := self.setup.options.config) is not None:
                self._write_config(_CONFIG_SECS if self.setup.loop.is_over else None)
                kept[CONFIG] = dict(config)
            if (code := self._known_code()) is not None:
                kept[CODE] = code
        return kept

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        wait(self._latest)
        if self._code is not None and not self.setup.signals.received_twice:
            wait([self._code], timeout=max(0.0, self._code_by - time.monotonic()))
        self._write_config(None if self.setup.signals.received_twice else _CONFIG_SECS)
        wait(self._reports)

    def _write_config(self, seconds: float | None) -> None:
        """Write the line of a config that was not ready, once it is; wait for it if there are `seconds`."""
        config = self.setup.options.config
        if self._is_config_late and (config.ready.done() if seconds is None else config.wait(seconds)):
            self._is_config_late = False
            self.setup.lines.write(CONFIG, config=dict(config))

    def _known_code(self) -> dict[str, Any] | None:
        code = self._code
        return code.result() if code is not None and code.done() and code.exception() is None else None

    def _begin(self, task: Callable[[], None]) -> None:
        before = self._latest

        def run() -> None:
            wait(before)
            with _logging_errors():
                task()

        self._latest = [in_background(run, name="jstep-card")]

    def _record(self, program: dict[str, Any], *, is_idle: bool = False) -> None:
        """Write the line of a program; for the first one, report the changes since the checkpoint."""
        if program.get("optimizer"):
            self._optimizers[str(program["stage"])] = ", ".join(program["optimizer"])
        if not is_idle:
            self.setup.lines.write("card", programs=[program])
        kept, self._kept = self._kept, None
        saver, step = self._saver, self._origin.restored
        if kept is None or saver is None or step is None:
            return
        code, past, optimizers = self._code, self._past(step), dict(self._optimizers)
        config = self.setup.options.config
        past["optimizers"] = optimizers

        def report() -> None:
            with _logging_errors():
                if config is not None:
                    wait([config.ready], timeout=_CONFIG_SECS)
                    config.wait(_CONFIG_SECS)
                wait([] if code is None else [code], timeout=_CODE_SECS)
                self._report(kept, past, program, saver, step, is_idle=is_idle)

        self._reports = [in_background(report, name="jstep-changes")]

    def _report(
        self,
        kept: Mapping[str, Any],
        past: Mapping[str, Any],
        program: Mapping[str, Any],
        saver: Saver,
        step: int,
        *,
        is_idle: bool,
    ) -> None:
        name, changes = checkpoint_name(saver.prefix, step), None
        if self._card is not None:
            now = {**self._card, CODE: self._known_code(), "programs": [program]}
            if (config := self.setup.options.config) is not None:
                now[CONFIG] = dict(config)
            changes = self._changes_since(kept.get(START), name, now, step)
        of_past = past_changes(step, name, kept, past, optimizers=changes is None)
        bits, place = changes or Changes([], [])
        report_changes(name, Changes([*bits, *of_past], place), is_idle=is_idle)

    def _changes_since(self, start: object, name: str, now: Mapping[str, Any], step: int) -> Changes | None:
        """Return the changes; None if the timeline does not contain the start, or its card cannot be read."""
        timeline = self.setup.lines.timeline
        if timeline is None:
            return None
        try:
            if isinstance(start, str):
                starts = [other for other in cards.read_starts(timeline.where, start) if other.id == start]
            else:  # an older version of jstep made the checkpoint
                starts = [other for other in cards.read_starts(timeline.where) if self._is_before(other, step)]
            if not starts:
                return None
            before = starts[-1].card
            if cards.is_whole(before) and before["programs"]:
                # The past covers the batches and lanes of the steps that were run; later ones do not matter.
                return card_differences.changes(before, now, step, leave_out=("batches", "lanes"))
            why = "the card of the start that made it cannot be read (it is torn, or of another version of jstep)"
            if cards.is_whole(before):  # a branch saves its first checkpoint before its first step
                why = "the start that made it ended before its first step"
        except FileNotFoundError:  # the timeline was deleted
            return None
        except Exception as error:
            why = f"the card of the start that made it cannot be read ({type(error).__name__}: {error})"
        _logger.info("%s: %s, so only optimizer, lanes and batches are compared", name, why)
        return None

    def _is_before(self, start: cards.Start, step: int) -> bool:
        timeline, prefix = self.setup.lines.timeline, "model" if self._saver is None else self._saver.prefix
        first = None if start.card is None else start.card.get("step")
        is_own = timeline is not None and start.id == timeline.start
        return not is_own and start.prefix == prefix and isinstance(first, int) and first < max(step, 1)

    def _past(self, step: int) -> dict[str, Any]:
        lanes = lanes_of(self.setup.train_steps.at(max(step - 1, 0)))
        past = record_past(self._batches, step, self._optimizers, lanes)
        timeline = self.setup.lines.timeline
        return past if timeline is None else {START: timeline.start, **past}


@contextlib.contextmanager
def _logging_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _logger.warning(
            "the card of this run could not be recorded: %s: %s", type(error).__name__, error, extra=BELOW_BAR
        )
