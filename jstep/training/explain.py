"""Explanations of errors of a train step, and of states that cannot be donated."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jstep.core import trees
from jstep.core.checks import describe_type
from jstep.core.exceptions import note
from jstep.core.meshes import mesh_of, using_mesh
from jstep.core.trees import Params, Tree
from jstep.slots.matching import NoGradientsError
from jstep.state.global_step import check_alive
from jstep.state.train_state import MODEL_STATE, TrainState
from jstep.training.watched_updates import watch_updates

_USE_ONE_MESH = (
    "The state and the batch, or arrays that the loss closes over, "
    "are on different devices or on different meshes. Put all of them on one mesh object: "
    "jstep.shard_state(state, mesh), jstep.shard_batch(batch, mesh)."
)
_DEVICE_ERRORS = re.compile(r"incompatible devices|device assignment|mesh.*should match")
"""The pattern of JAX's errors about devices and meshes."""

_A_LIST = (
    "the batch is a list, which is one argument; a tuple is several: give (x, y). "
    "With torch's DataLoader pass collate_fn=lambda rows: tuple(default_collate(rows)); "
    "map(tuple, loader) would lose the loader's position"
)
_OTHER_ARGUMENTS = re.compile(
    r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)"
    r"|takes \d+ positional arguments? but \d+ "
)
_CALLED = re.compile(r"'(\w+)' object is not callable")
_NOT_ACCEPTED = re.compile(r"unexpected keyword argument '(rng|averages|model_state)'")
_PASSED_WITH = {
    "rng": "rng=key",
    "averages": "use_averages=True",
    "model_state": "has_model_state=True",
}
"""Arguments of a loss → the argument of `minimize` that passes them."""


def explain_arguments(
    error: BaseException, args: Sequence[Any], state: Tree, *, has_model_state: bool = True
) -> None:
    """Note on an error of a loss or a step that its arguments seem to be others than it expects."""
    if not isinstance(error, TypeError | AttributeError):
        return
    lacks_model_state = not has_model_state and MODEL_STATE in getattr(state, "slots", ())
    hint = _hint_at_model(str(error), getattr(state, "params", None))
    hint = hint or _hint_at_arguments(str(error), args, lacks_model_state=lacks_model_state)
    if hint:
        note(error, f"jstep: {hint}")


def _hint_at_model(message: str, params: Params) -> str:
    """Say how a loss calls the model, if it called its parameters; say nothing otherwise."""
    match = _CALLED.search(message)
    if match is None or match[1] != type(params).__name__:
        return ""
    if type(params).__module__.startswith("flax.nnx"):
        return (
            "a loss gets the parameters, an nnx.State, not the model: "
            "with graphdef, params = nnx.split(model), write "
            "model = nnx.merge(graphdef, params) in loss_fn(params, *batch) (see docs/from/flax.md)"
        )
    return (
        f"a loss gets the parameters, a {match[1]}, not the model: "
        "call the model with them, such as "
        'model.apply({"params": params}, x) of Flax Linen'
    )


def _hint_at_arguments(message: str, args: Sequence[Any], *, lacks_model_state: bool) -> str:
    match = _OTHER_ARGUMENTS.search(message)
    if match is not None and lacks_model_state:
        return "the state has a model_state, which the function gets with has_model_state=True"
    unexpected = _NOT_ACCEPTED.search(message)
    if unexpected is not None:
        name = unexpected[1]
        return (
            f"minimize(…, {_PASSED_WITH[name]}) passes it by name: "
            f"def loss_fn(params, *batch, {name})"
        )
    missing = [
        name for name in _PASSED_WITH if match is not None and f"'{name}'" in (match[1] or "")
    ]
    if missing:
        options = ", ".join(_PASSED_WITH[name] for name in missing)
        return f"a loss gets {' and '.join(missing)} with minimize(…, {options})"
    if len(args) != 1:
        if match is None:
            return ""
        return (
            f"the batch is a tuple, passed as {len(args)} arguments; "
            "a dict or a list is passed as one"
        )
    (batch,) = args
    if isinstance(batch, list):
        return _A_LIST
    if batch is None:
        return "the batch is None; a function of the step must return the batch"
    if match is None:
        return ""
    return (
        f"the batch is {describe_type(batch)}, which is one argument; a tuple is passed as several"
    )


def call_custom_step(step: Callable[..., Any], state: Tree, *args: Any) -> Any:
    """Call a step that jstep did not make; if it fails, say whether it is a loss."""
    try:
        with watch_updates(state):
            return step(state, *args)
    except Exception as error:
        frames = error.__traceback__
        # Flax has its own TypeErrors.
        is_type_error = "TypeError" in type(error).__name__
        may_be_loss = is_type_error or isinstance(error, AttributeError | ValueError)
        is_loss = may_be_loss and _is_loss(step, state, args)
        # `_is_loss` may have raised the same object again, which has added its frames.
        BaseException.with_traceback(error, frames)
        if is_loss:
            name = getattr(step, "__name__", "")
            name = name if name.isidentifier() else "loss_fn"
            raise TypeError(
                f"train_step={name}: must be a step (state, *args) -> (state, metrics), got a "
                f"loss, a function of the parameters; its step is jstep.minimize({name}, optimizer)"
            ) from error
        explain_arguments(error, args, state)
        raise


def _is_loss(fn: Callable[..., Any], state: Tree, args: tuple[Any, ...]) -> bool:
    """Whether a function returns a scalar if it gets parameters instead of the state."""
    try:
        with using_mesh(mesh_of((state, args))):
            out = jax.eval_shape(fn, state.params, *args)
        loss = out[0] if isinstance(out, tuple) else out
        return loss.shape == () and jax.numpy.issubdtype(loss.dtype, jax.numpy.floating)
    except Exception:
        return False


def explain_missing_gradients(error: Exception, params: Params, gradients: Sequence[Any]) -> None:
    leaves = zip(trees.leaves_with_paths(params), gradients, strict=True)
    missing = [
        path for (path, leaf), gradient in leaves if gradient is None and trees.is_trainable(leaf)
    ]
    if missing and "None" in str(error) and not isinstance(error, NoGradientsError):
        note(
            error,
            f"jstep: the gradients of {missing[:5]} are None, "
            "because the loss does not depend on them or var_list leaves them out; "
            "return the update None for them, as jstep.leafwise does, or with jstep.map_gradients",
        )


def explain(error: BaseException, state: Tree, args: Any, *, donates: bool) -> None:
    """Raise a better error than that of a program, or note on it, if its cause is known."""
    if not isinstance(error, RuntimeError | ValueError):
        if isinstance(error, TypeError):  # from JAX, about a whole module in place of its arrays
            _check_arrays_of(state)
        return
    if not trees.is_donated(getattr(state, "global_step", None)):
        check_alive(state, error)
        if donates:
            check_no_shared_buffers(state, args, error)
    note_other_devices(error)


def _check_arrays_of(state: Tree) -> None:
    if isinstance(state, TrainState):
        trees.check_arrays(state.params, "params", trees.keep_arrays("params"))
    else:
        trees.check_arrays(state, "state", trees.keep_arrays("state"))


def note_other_devices(error: BaseException) -> None:
    if _DEVICE_ERRORS.search(str(error)):
        note(error, _USE_ONE_MESH)


# Memory that cannot be donated.


def check_will_not_crash(state: Tree, args: Any, *, is_known: bool, donates: bool) -> None:
    """Reject states that JAX reports on one device, but that crash the process on a mesh.

    `is_known`: a step returned the state, so its leaves share no buffers. Then only an array that
    is passed twice has to be looked for, which is quick: this comes before each call on a mesh.
    """
    check_alive(state)
    if not donates:
        return
    # A comprehension for its speed: this runs at each step.
    batch_arrays = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)]
    arrays = [*jax.tree.leaves(state), *batch_arrays]
    is_passed_twice = len(set(map(id, arrays))) < len(arrays)
    if is_passed_twice or not is_known:
        check_no_shared_buffers(state, args)


def check_no_shared_buffers(state: Tree, args: Any, cause: BaseException | None = None) -> None:
    """Reject a state with a buffer that would be donated twice or is used by another argument."""
    seen: dict[Any, str] = {}
    for path, leaf in trees.leaves_with_paths(state):
        buffer = _buffer(leaf)
        if buffer is not None and seen.setdefault(buffer, path) != path:
            raise ValueError(
                f"state: {seen[buffer]!r} and {path!r} share one buffer, "
                "which cannot be donated twice; copy one"
            ) from cause
    for path, leaf in trees.leaves_with_paths(args):
        buffer = _buffer(leaf)
        if buffer in seen:
            raise ValueError(
                f"state: {seen[buffer]!r} and the step's argument {path!r} share one buffer, "
                "which a compiled step cannot both donate and read; pass a copy (jnp.copy), "
                "or create the step with donate=False"
            ) from cause


def _buffer(leaf: Any) -> Any:
    """Return an identifier of the memory of an array; None if it has none on this process."""
    if (
        not isinstance(leaf, jax.Array)
        or trees.is_traced(leaf)
        or leaf.is_deleted()
        or not leaf.size
    ):
        return None
    leaf = trees.key_data(leaf)
    if not leaf.sharding.addressable_devices:
        return None
    part = leaf.addressable_data(0)
    try:
        return next(iter(part.devices())), part.unsafe_buffer_pointer()
    except Exception:  # a backend without buffer pointers
        return id(leaf)
