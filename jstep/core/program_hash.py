"""Hash what a traced function computes: the same in every process and on every machine.

Variables are numbered in the order in which they appear. Names, source positions, memory addresses, and rules of
differentiation that were not used are left out; constants count by value, host callbacks by their qualified name.
"""

import collections
import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jstep.core.contexts import internal_transfers
from jstep.core.trees import is_key

_ORIGINS = {"name", "debug_info", "ctx_mesh", "name_and_src_info", "src_info", "source_info", "origin"}
_RULES = {"jvp_jaxpr_fun", "jvp", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "fwd", "bwd"}
_UNSAID = _ORIGINS | _RULES | {"callback_id", "call_id"}
"""Parameters of operations that describe the source of a program, or its rules of differentiation."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_FILE = re.compile(r"[^\s'\"<>()\[\],=]*\.py\b(?::\d+)*")


class ProgramHash(NamedTuple):
    """The hash of a program, with statistics to compare programs.

    Attributes:
        digest: The hash, 32 hexadecimal digits.
        operations: Name of an operation → number of occurrences, including inner programs.
        numbers: Scalar constant → number of occurrences.
        functions: Name of an inner jitted function → number of occurrences. Names are not hashed.
    """

    digest: str
    operations: collections.Counter[str]
    numbers: collections.Counter[str]
    functions: collections.Counter[str]


def program_hash(closed: Any) -> ProgramHash:
    """Hash a traced function, a `ClosedJaxpr`.

    Example:
        >>> import jax
        >>> from jstep.core.program_hash import program_hash
        >>> functions = (lambda x: 2 * x), (lambda y: 2 * y), (lambda x: 3 * x)
        >>> one, other, third = (program_hash(jax.make_jaxpr(f)(1.0)).digest for f in functions)
        >>> one == other, one == third
        (True, False)
    """
    return _Hasher().program(closed)


def digest_of(*parts: str) -> str:
    """Hash some strings to 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16, person=b"jstep")
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def mesh_text(mesh: Any) -> str:
    """Format the axes of a mesh with their sizes and types: `data: 4 Explicit, model: 2 Auto`."""
    types = mesh.axis_types
    sizes = dict(mesh.shape)
    return ", ".join(f"{name}: {sizes[name]} {kind.name}" for name, kind in zip(mesh.axis_names, types, strict=True))


def sharding_text(sharding: Any) -> str:
    """Format a sharding without its devices: the spec, the axes of the mesh, and the memory kind."""
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} over ({mesh_text(sharding.mesh)}){memory}"
    return f"{type(sharding).__name__}{memory}"


class _Hasher:
    """Hasher of programs; a repeated inner program is hashed once."""

    def __init__(self) -> None:
        self._seen: dict[int, ProgramHash] = {}
        self._type = functools.cache(_type_text)  # few types, many variables
        self._operations: collections.Counter[str] = collections.Counter()
        self._numbers: collections.Counter[str] = collections.Counter()
        self._functions: collections.Counter[str] = collections.Counter()

    def program(self, closed: Any) -> ProgramHash:
        """Hash a program with its constants, or an open program without constants."""
        if id(closed) not in self._seen:
            outer = self._operations, self._numbers, self._functions
            self._operations, self._numbers, self._functions = (collections.Counter() for _ in outer)
            jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
            parts = self._jaxpr(jaxpr) + [self.text(const) for const in getattr(closed, "consts", ())]
            self._seen[id(closed)] = ProgramHash(digest_of(*parts), self._operations, self._numbers, self._functions)
            self._operations, self._numbers, self._functions = outer
        found = self._seen[id(closed)]
        self._operations.update(found.operations)
        self._numbers.update(found.numbers)
        self._functions.update(found.functions)
        return found

    def _jaxpr(self, jaxpr: Any) -> list[str]:
        numbers: dict[Any, int] = {}

        def bound(variables: Any) -> str:
            for variable in variables:
                numbers[variable] = len(numbers)
            return " ".join(self._type(variable.aval) for variable in variables)

        def used(atoms: Any) -> str:
            return " ".join(
                self._literal(atom) if isinstance(atom, core.Literal) else str(numbers[atom]) for atom in atoms
            )

        parts = [bound(jaxpr.constvars), bound(jaxpr.invars)]
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            self._operations[name] += 1
            if name in ("jit", "pjit"):
                self._functions[eqn.params["name"]] += 1
            parts += [name, used(eqn.invars), self._fields(eqn.params), bound(eqn.outvars)]
        return [*parts, used(jaxpr.outvars)]

    def _literal(self, atom: Any) -> str:
        dtype = atom.aval.dtype
        if isinstance(dtype, np.dtype) and np.ndim(atom.val) == 0:
            number = str(np.asarray(atom.val).astype(dtype))
            self._numbers[number] += 1
            return f"{self._type(atom.aval)}={number}"
        return f"{self._type(atom.aval)}={self.text(atom.val)}"

    def _fields(self, fields: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={self.text(fields[name])}" for name in sorted(fields) if name not in _UNSAID)

    def text(self, x: Any) -> str:
        """Format a parameter of an operation."""
        if isinstance(x, enum.Enum):
            return f"{type(x).__qualname__}.{x.name}"
        if x is None or isinstance(x, bool | int | float | complex | str | bytes):
            return repr(x)
        if isinstance(x, core.Jaxpr | core.ClosedJaxpr):
            return self.program(x).digest
        if isinstance(x, np.ndarray | np.generic | jax.Array):
            return _array_text(x)
        if isinstance(x, Mapping):
            return "{" + ", ".join(sorted(f"{self.text(key)}: {self.text(x[key])}" for key in x)) + "}"
        if isinstance(x, tuple | list):
            return f"({', '.join(map(self.text, x))})"
        if isinstance(x, set | frozenset):
            return "{" + ", ".join(sorted(map(self.text, x))) + "}"
        if isinstance(x, Mesh | AbstractMesh):
            return f"mesh({mesh_text(x)})"
        if isinstance(x, Sharding):
            return sharding_text(x)
        if isinstance(x, functools.partial):
            return f"partial({self.text(x.func)}, {self.text(x.args)}, {self.text(x.keywords)})"
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = {field.name: getattr(x, field.name, None) for field in dataclasses.fields(x)}
            return f"{type(x).__qualname__}({self._fields(fields)})"
        if callable(x) and hasattr(x, "__qualname__"):
            return f"{x.__module__}.{x.__qualname__}"
        return f"{type(x).__qualname__} {without_addresses(repr(x))}"


def without_addresses(text: str) -> str:
    """Remove memory addresses and names of source files from a repr."""
    return _FILE.sub("*.py", _ADDRESS.sub("0x", text))


def _type_text(aval: Any) -> str:
    weak = "~" if getattr(aval, "weak_type", False) else ""
    return weak + without_addresses(str(aval))


def _array_text(x: Any) -> str:
    if isinstance(x, jax.Array):
        if is_key(x):
            return f"{x.dtype} {_array_text(jax.random.key_data(x))}"
        if not x.is_fully_addressable:  # its values are on other hosts
            return f"{x.dtype}{list(x.shape)} of several processes"
    with internal_transfers():
        array = np.ascontiguousarray(x)
    values = array.view(np.uint8) if array.dtype.kind == "V" else array
    return f"{array.dtype}{list(np.shape(x))} {hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()}"
