"""The environment of a run: versions, settings and devices, recorded for comparison."""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax

from jstep.core.meshes import mesh_of
from jstep.core.program_hash import mesh_text

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


def versions() -> dict[str, str | None]:
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
    found = {}
    for name in sorted(variables):
        if name == "XLA_FLAGS" or name.startswith("JAX_"):
            found[name] = "(not recorded)" if _SECRET.search(name) else without_login(variables[name])
    return found


def without_login(text: str) -> str:
    """A path or an address without the user name, password or signature that a URL may hold."""
    return _QUERY.sub(r"\1", _LOGIN.sub(r"\1", text))


def settings() -> dict[str, Any]:
    """The settings of JAX that change what is computed."""
    found = {name: getattr(jax.config, name, None) for name in _SETTINGS}
    return {name: value if isinstance(value, bool | None) else str(value) for name, value in found.items()}


def devices(state: Any) -> dict[str, Any]:
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
