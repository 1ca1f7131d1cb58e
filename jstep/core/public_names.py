"""Public names: `__module__`, and hints for names, attributes and arguments of other libraries."""

import difflib
import functools
import importlib.resources
import inspect
import sys
import tomllib
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T")


MOVED: dict[str, str] = {
    "EarlyStopping.bad": "wait",
    "EarlyStopping.why": "stop_reason",
    "ReduceOnPlateau.bad": "wait",
}
"""Old name → new one. The old one works for two minor releases, with a DeprecationWarning.

Forms: `adam_with_decay` of the package, `EarlyStopping.bad` of an attribute, `KeepBest(keep=)` of
an argument.
"""


def new_name(package: str, name: str) -> str:
    new = MOVED[name]
    # The level of the program: this function is called by the `__getattr__` of the package.
    warnings.warn(
        f"{package}.{name} is called {package}.{new} now", DeprecationWarning, stacklevel=3
    )
    return new


def rename_arguments(
    fn: Callable[..., Any], kwargs: Mapping[str, Any], typed: str = ""
) -> dict[str, Any] | None:
    """Return a call's arguments by their new names.

    None if none of them has an old name, or if one is given by both names.
    """
    owner = _name_of_call(fn, typed)
    moved: dict[str, str] = {}
    for name in kwargs:
        new = MOVED.get(f"{owner}({name}=)")
        if new is not None:
            moved[name] = new
    if not moved or not kwargs.keys().isdisjoint(moved.values()):
        return None
    for old, new in moved.items():
        # The level of the program: this function is called by the wrapper around `fn`.
        warnings.warn(
            f"{owner}({old}=…) is called {owner}({new}=…) now", DeprecationWarning, stacklevel=3
        )
    return {moved.get(name, name): value for name, value in kwargs.items()}


def _name_of_call(fn: Callable[..., Any], typed: str) -> str:
    return typed or getattr(fn, "__qualname__", "").removesuffix(".__init__")


def show_in(package: str, value: object) -> None:
    """Let a public function or exception show the package that it is imported from.

    Other classes keep their module, by which `inspect.getsource` and type hints find it.
    """
    is_exception = isinstance(value, type) and issubclass(value, BaseException)
    if not is_exception and not isinstance(value, types.FunctionType):
        return
    if value.__module__.startswith("jstep"):
        value.__module__ = package
        if "__firstlineno__" in vars(value):  # Python 3.13: a line of another file
            del value.__firstlineno__  # type: ignore[attr-defined]


def is_public(named: Any) -> bool:
    root = sys.modules["jstep"]
    name = named.__qualname__
    # The list first: for a name that the package does not have, `getattr` would compose an error
    # with hints.
    return name in root.__all__ and getattr(root, name) is named


def public_name(named: Any) -> str:
    """The full name of a class or function, as users import it: `jstep.Saver`."""
    module = "jstep" if is_public(named) else named.__module__
    return f"{module}.{named.__qualname__}"


def set_public_module(namespace: dict[str, Any]) -> None:
    """Show the names of `__all__` in `jstep`, or in the package if the root does not have them."""
    package = namespace["__name__"]
    root = sys.modules[package.partition(".")[0]]
    for name in namespace["__all__"]:
        show_in(root.__name__ if name in root.__all__ else package, namespace.get(name))
    namespace["__dir__"] = lambda: sorted(namespace["__all__"])

    def missing(name: str) -> NoReturn:
        raise attribute_error(f"module {package!r}", name, sys.modules[package])

    namespace["__getattr__"] = missing


def find_hint(typed: str) -> str:
    """Return a hint at jstep's equivalent of a name of another library; empty if unknown.

    Forms: `AdamOptimizer`, `Optimizer.minimize`, `minimize(global_step=)`, `(use_locking=)`,
    `apply_gradients()`, `train(*)`.
    """
    return _hints().get(typed) or _folded_hints().get(typed.casefold(), "")


def attribute_error(owner: str, name: str, obj: object, prefix: str = "") -> AttributeError:
    hint = find_hint(prefix + name)
    # Python suggests a similar name of `obj`, which would contradict what is known.
    return AttributeError(
        f"{owner} has no attribute {name!r}{hint}", name=name, obj=None if hint else obj
    )


def explain_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: TypeError,
    typed: str = "",
) -> str:
    """Say what to type for a call that does not fit a signature; empty if it fits or is unknown."""
    signature = inspect.signature(fn)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return ""
    owner = _name_of_call(fn, typed)
    unknown = [name for name in kwargs if name not in signature.parameters]
    if not unknown:
        hint = find_hint(f"{owner}(*)") or find_hint(f"{owner}()")
        return hint + _keyword_only_hint(owner, signature, args)
    remedies = {name: find_hint(f"{owner}({name}=)") or find_hint(f"({name}=)") for name in unknown}
    known = {name: remedy for name, remedy in remedies.items() if remedy}
    if len(unknown) > 1 and known:
        # Python names only the first of them. After `b1=0.9, b2=0.99, eps=1e-8` a user learns all
        # three names together.
        return "".join(f"{remedy} for {name}" for name, remedy in known.items())
    if known:
        return known[unknown[0]]
    nearest = difflib.get_close_matches(unknown[0], signature.parameters, n=1, cutoff=_SPELLING)
    if nearest:
        return f". Did you mean {nearest[0]!r}?"
    hint = find_hint(f"{owner}()")
    if hint:
        return hint
    # The function has explained it by itself, such as a schedule that is given TF's global_step.
    is_explained = "; " in str(error)
    return "" if is_explained else _list_arguments(signature)


_SPELLING = 0.8
"""How similar a misspelt argument is: `num_microbatch` is 0.93; `batch_size`, which is not
`batches`, is 0.7."""


def _list_arguments(signature: inspect.Signature) -> str:
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [name for name, parameter in signature.parameters.items() if parameter.kind in keywords]
    names = [name for name in named if name != "self"]
    return f"; the arguments are {', '.join(names)}" if names else ""


def _keyword_only_hint(owner: str, signature: inspect.Signature, args: tuple[Any, ...]) -> str:
    """Show how to type a call with too many positional arguments; empty if that does not help."""
    parameters = list(signature.parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return ""
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    surplus = len(args) - len(positional)
    if not 0 < surplus <= len(keyword_only):
        return ""
    shown = [name for name in positional if name != "self"]
    what = f"what follows {shown[-1]}" if shown else "each argument"
    shown += [f"{name}=…" for name in keyword_only[:surplus]]
    ellipsis = ", …" if surplus < len(keyword_only) else ""
    return f"; use {owner}({', '.join(shown)}{ellipsis}): {what} is given by name"


def explains_attributes(cls: type[_T], *, owner: str = "", typed: str = "") -> type[_T]:
    """Class decorator: errors of other libraries' attributes say what to type, and old names work.

    Args:
        owner: What the error calls an object; by default the name of its class.
        typed: The name of the class in the table of hints; by default its own.
    """

    def missing(self: object, name: str) -> Any:
        new = MOVED.get(f"{cls.__name__}.{name}")
        if new is not None:
            warnings.warn(
                f"{cls.__name__}.{name} is called {new} now", DeprecationWarning, stacklevel=2
            )
            return getattr(self, new)
        shown = owner or f"{type(self).__name__!r} object"
        # Protocols (`__array__`, `__setstate__`, IPython's `_repr_png_`) look for names that no
        # library's user types.
        if name.startswith("_"):
            raise AttributeError(f"{shown} has no attribute {name!r}")
        raise attribute_error(shown, name, self, f"{typed or cls.__name__}.")

    cls.__getattr__ = missing  # type: ignore[attr-defined]  # type checkers know all attributes
    return cls


@functools.cache
def _hints() -> Mapping[str, str]:
    # What is typed → {jstep's equivalent: the pages that say so}.
    equivalents: dict[str, dict[str, list[str]]] = {}

    def add(typed: str, ours: str, page: str) -> None:
        equivalents.setdefault(typed, {}).setdefault(ours, []).append(page)

    for page, rows in pages().items():
        for ours, theirs in rows.items():
            for typed in theirs.split():
                add(typed, ours, page)
                if typed.startswith("train("):  # the arguments of `Run` are those of `train`
                    add(f"Run{typed.removeprefix('train')}", ours, page)
    return {typed: _hint_of(pages_of) for typed, pages_of in equivalents.items()}


@functools.cache
def _folded_hints() -> Mapping[str, str]:
    """Return hints by what is typed, in lower case, and those for jstep's names in other cases."""
    folded: dict[str, str] = {}
    for typed, hint in _hints().items():
        # The first of several: `Adam` is the name in PyTorch and in Keras, `adam` is ours.
        folded.setdefault(typed.casefold(), hint)
    for name in sys.modules["jstep"].__all__:
        folded.setdefault(name.casefold(), f"; use jstep.{name}")
    return folded


def _hint_of(pages_of: Mapping[str, list[str]]) -> str:
    texts = [f"{ours} (see {' and '.join(about)})" for ours, about in pages_of.items()]
    verb = "" if texts[0].startswith("nothing in its place") else "use "
    return f"; {verb}{', or '.join(texts)}"


@functools.cache
def pages() -> Mapping[str, Mapping[str, str]]:
    """Return page of the documentation → {jstep's equivalent: what is typed with the library}."""
    table = importlib.resources.files("jstep.core").joinpath("names_of_others.toml")
    return tomllib.loads(table.read_text(encoding="utf-8"))
