"""Loading XLA's TPU and GPU compilers on a machine without these devices, and listing compile-only devices."""

import glob
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jax.experimental import topologies

from jstep.core.devices import GPUS, TPUS, Name, target_config

_lock = threading.Lock()
_made: dict[Name, Sequence[Any]] = {}

_WITHOUT_TPUS = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to query
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # this and the next only keep libtpu from writing to stderr
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once; if they share TPUs this may crash
}
_WITHOUT_GPUS = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # else the plugin requires cuDNN, which only running needs


def devices_of(name: Name) -> Sequence[Any]:
    """Return the compile-only devices of a topology, cached by name so that equal names give equal meshes.

    Raises:
        ImportError: The compiler is not installed; the message has the command that installs it.
    """
    with _lock:
        if name not in _made:
            require_compiler(name)
            prepare()
            _made[name] = _gpus(name) if name.kind in GPUS else _tpus(name)
        return _made[name]


def require_compiler(name: Name) -> None:
    """Check that the compiler of a topology is installed, without loading it.

    Raises:
        ImportError: It is not; the message has the command that installs it.
    """
    if name.kind not in GPUS:
        if not os.environ.get("TPU_LIBRARY_PATH") and importlib.util.find_spec("libtpu") is None:
            raise _missing(name, "libtpu", "tpu")
    elif not _plugins():
        raise _missing(name, "the CUDA plugin of JAX", "aot-cuda")
    elif not _has_cuda_compiler():
        raise _missing(name, "NVIDIA's compiler (ptxas and libdevice)", "aot-cuda")


def name_of(device: Any) -> Name | None:
    """Return the topology that a device belongs to, or None for any other device."""
    with _lock:
        made = list(_made.items())
    return next((name for name, devices in made if devices[0].client is device.client), None)


def _tpus(name: Name) -> Sequence[Any]:
    options: dict[str, Any] = dict(TPUS[name.kind].options)
    if set(name.sizes) == {1}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if name.slices > 1:
        options["num_slices"] = name.slices
    size = "x".join(map(str, name.sizes))
    description = topologies.get_topology_desc(platform="tpu", topology_name=f"{name.kind}:{size}", **options)
    return tuple(description.devices)


def _gpus(name: Name) -> Sequence[Any]:
    size = "x".join(map(str, name.sizes))

    def make() -> Sequence[Any]:
        options = {"target_config": target_config(GPUS[name.kind]), "topology": f"1x{size}"}
        return tuple(topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices)

    try:
        return make()
    except NotImplementedError:
        # JAX was already initialized and discarded the plugin because there is no GPU.
        importlib.import_module(_plugins()[0]).initialize()
        return make()


def prepare() -> None:
    """Set the environment variables that the compilers read when loaded, unless already set or the devices exist."""
    settings: dict[str, str] = {}
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
        settings |= _WITHOUT_TPUS
    if not glob.glob("/dev/nvidia[0-9]*"):
        settings |= _WITHOUT_GPUS
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)


def _plugins() -> list[str]:
    """Return the installed CUDA plugins of JAX, the newest first."""
    return [found for found in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12") if _is_installed(found)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _has_cuda_compiler() -> bool:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        if _is_installed(package):
            spec = importlib.util.find_spec(package)
            roots += list(spec.submodule_search_locations or ()) if spec is not None else []
    ptxas = shutil.which("ptxas")
    roots += [str(pathlib.Path(ptxas).parent.parent)] if ptxas else []
    return any(
        root and pathlib.Path(root, "bin", "ptxas").exists() and pathlib.Path(root, "nvvm", "libdevice").exists()
        for root in roots
    )


def _missing(name: Name, what: str, extra: str) -> ImportError:
    return ImportError(f"{name}: {what} is not installed; run: pip install 'jstep[{extra}]'")


def versions(kind: str) -> Mapping[str, str]:
    """Return the versions of the installed packages that compile for a kind of device."""
    wanted = ("jax", "jax-cuda13-plugin", "jax-cuda12-plugin") if kind in GPUS else ("jax", "libtpu")
    found = {}
    for package in wanted:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
