"""Arrays in tagged JSON: NumPy arrays, torch tensors, JAX arrays and keys."""

import contextlib
import importlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib import format as npy

from jstep.core.meshes import internal_transfers

_MAX_AXES = 64
"""The maximum axes of an array of NumPy."""
LARGE = 2**16
"""The number of bytes above which an array is a file of the checkpoint, and a position is not
copied at each batch."""


class UnsupportedError(TypeError):
    """A value cannot be encoded.

    Attributes:
        path: Its path in the outermost value, such as `['epoch'][0]`.
    """

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(f"{path} {what}".strip())
        self.what = what
        self.path = path


# Arrays of NumPy


def array_parts(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    if array.size and not array.itemsize:
        raise UnsupportedError(
            f"is a NumPy array of dtype {array.dtype}, whose elements have no bytes"
        )
    parts = {"dtype": dtype_parts(array.dtype), "shape": list(array.shape)}
    axes = _axes_in_memory(array.shape, array.strides)
    if axes is None:
        return parts | {"data": array.tobytes()}
    return parts | {"axes": axes, "data": array.transpose(axes).tobytes()}


def _axes_in_memory(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Return the axes from the outermost in memory to the innermost; None if that is their order.

    The order is kept because sums are rounded differently in another one. Gaps, negative strides
    and broadcast axes are not kept.
    """
    if not math.prod(shape):
        return None
    if any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True)):
        return None  # a broadcast axis
    # Axes of size 1 come first, because their strides mean nothing.
    ones = [axis for axis, size in enumerate(shape) if size == 1]
    others = [axis for axis, size in enumerate(shape) if size > 1]
    memory_order = sorted(others, key=lambda axis: -abs(strides[axis]))
    if memory_order == others:
        return None
    return [*ones, *memory_order]


def _inverse(axes: Any, shape: tuple[int, ...]) -> list[int]:
    if sorted(axes) != list(range(len(shape))):
        raise ValueError(f"{axes!r:.50} are not the axes of the shape {shape}")
    return [axes.index(axis) for axis in range(len(shape))]


def dtype_parts(dtype: np.dtype[Any]) -> Any:
    """Return a description of a dtype: a name such as '<f4' or 'bfloat16', or a list of fields."""
    descriptions: tuple[Any, ...] = ()
    if not dtype.hasobject:
        descriptions = (dtype.str, dtype.name, npy.dtype_to_descr(dtype))
    for description in descriptions:
        with contextlib.suppress(TypeError):
            if npy.descr_to_dtype(description) == dtype:
                return description
    raise UnsupportedError(f"is a NumPy array of dtype {dtype}")


# NumPy evaluates parts of some other descriptions as Python, such as "(2,)f4".
_DTYPE = re.compile(
    # Such as <f4 and <M8[25s].
    r"[<>|](?:[biufcSUV][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)"
    r"|[a-z]{3,20}[0-9]{1,3}[a-z0-9_]{0,30}"  # such as bfloat16 and float8_e4m3fn
)


def _dtype(description: Any) -> np.dtype[Any]:
    """Return the dtype of a description by `dtype_parts`; NumPy does not get any other string."""
    if _is_dtype(description):
        dtype = npy.descr_to_dtype(description)
        if dtype_parts(dtype) == description:
            return dtype
    raise ValueError(f"{description!r:.50} is not a dtype as jstep writes it")


def _is_dtype(description: Any) -> bool:
    if isinstance(description, str):
        return _DTYPE.fullmatch(description) is not None
    return isinstance(description, list) and all(map(_is_field, description))


def _is_field(field: Any) -> bool:
    """Whether this is a dtype's field: a name, or title and name, a dtype, and perhaps a shape."""
    if not isinstance(field, tuple) or len(field) not in (2, 3):
        return False
    name, description, *shapes = field
    names = name if isinstance(name, tuple) else (name,)
    if len(names) > 2 or not all(isinstance(text, str) for text in names):
        return False
    if not _is_dtype(description):
        return False
    for shape in shapes:
        _shape(shape)  # raises an error if it is not one
    return True


class UnknownPartError(ValueError):
    """A value has a part that this version does not know; another one may have written it.

    Attributes:
        part: The part, for messages.
    """

    def __init__(self, part: str) -> None:
        super().__init__(f"{part} is not known; another version of jstep may have written it")
        self.part = part


_ARRAY_PARTS = ("dtype", "shape", "axes", "data")


def check_known(parts: Mapping[str, Any], known: Collection[str]) -> None:
    """Reject a part that this version does not know: it may change the meaning of the others."""
    unknown = sorted(parts.keys() - known)
    if unknown:
        raise UnknownPartError(f"the part {unknown[0]!r:.50}")


def decode_array(parts: Any) -> np.ndarray[Any, Any]:
    check_known(parts, _ARRAY_PARTS)
    dtype = _dtype(parts["dtype"])
    shape = _shape(parts["shape"])
    data = parts["data"]
    elements = math.prod(shape)
    # Elements without bytes need no data, but NumPy would allocate memory for some of them.
    is_without_bytes = elements > 0 and dtype.itemsize == 0
    if dtype.hasobject or is_without_bytes or len(data) != elements * dtype.itemsize:
        raise ValueError(f"an array of {dtype} and shape {shape} does not have {len(data)} bytes")
    axes = parts.get("axes", list(range(len(shape))))
    inverse = _inverse(axes, shape)
    stored = np.ndarray([shape[axis] for axis in axes], dtype, data)
    return stored.transpose(inverse).copy(order="K")


def _shape(value: Any) -> tuple[int, ...]:
    # The product of very many sizes is a number whose computation takes quadratic time.
    if len(value) > _MAX_AXES or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError(f"{value!r:.50} is not a shape")
    return tuple(value)


# Tensors of torch


def tensor_parts(tensor: Any) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedError(
            f"is a torch tensor that is sparse, quantized or without values, of dtype {name}"
        )
    parts = {"dtype": name, "shape": list(tensor.shape)}
    axes = _axes_in_memory(tensor.shape, tensor.stride())
    if axes is not None:
        parts["axes"] = axes
        tensor = tensor.permute(axes)
    flat = tensor.detach().cpu().reshape(-1).resolve_conj().resolve_neg().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return parts | {"data": flat.view(torch.uint8).numpy().tobytes()}


def decode_tensor(parts: Any) -> Any:
    check_known(parts, _ARRAY_PARTS)
    torch = importlib.import_module("torch")
    name = parts["dtype"]
    dtype = None
    # Not any attribute: some of torch's are modules, which are then imported.
    if name == "bool" or _DTYPE.fullmatch(name):
        dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r:.50} is not a torch.dtype")
    shape = _shape(parts["shape"])
    data = parts["data"]
    if len(data) != math.prod(shape) * torch.empty(0, dtype=dtype).element_size():
        raise ValueError(f"a tensor of {dtype} and shape {shape} does not have {len(data)} bytes")
    if not data:
        return torch.empty(shape, dtype=dtype)
    axes = parts.get("axes", list(range(len(shape))))
    inverse = _inverse(axes, shape)
    stored = torch.frombuffer(bytearray(data), dtype=dtype).reshape([shape[axis] for axis in axes])
    return stored.permute(inverse)


# Arrays and keys of JAX


def jax_parts(array: jax.Array) -> dict[str, Any]:
    """Return the encoding of an array or key: if small, a copy on its device, without waiting.

    The array itself may be donated before the copy is used.
    """
    is_usable = False
    if not isinstance(array, jax.core.Tracer) and not array.is_deleted():
        is_usable = array.is_fully_addressable or array.is_fully_replicated
    if not is_usable:
        raise UnsupportedError(
            "is a JAX array that is traced, was donated, or has parts on other processes"
        )
    weak = bool(getattr(array, "weak_type", False))  # keys have none
    data = array
    impl = None
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(array))
        data = jax.random.key_data(array)
    with internal_transfers():
        copied: Any = data.copy() if data.nbytes <= LARGE else host_parts(data)
    return {"$jax": {"data": copied, "impl": impl, "weak": weak}}


def host_parts(array: jax.Array) -> dict[str, Any]:
    """Return the encoding of an array as one of NumPy, which waits for it."""
    with internal_transfers():
        parts = array_parts(np.asarray(array))
    return {"$array": {**parts, "data": {"$bytes": parts["data"]}}}


def decode_jax_array(parts: Any) -> jax.Array:
    check_known(parts, ("data", "impl", "weak"))
    data = parts["data"]
    impl = parts["impl"]
    weak = parts["weak"]
    with internal_transfers():
        if impl is not None:
            return jax.random.wrap_key_data(jnp.asarray(data), impl=str(impl))
        array = jnp.asarray(data)
        if array.dtype != data.dtype:
            raise ValueError(
                f"{data.dtype} needs 64-bit types, which are off: set "
                "jax_enable_x64, as in that run"
            )
        if weak and not array.weak_type:
            # Python's numbers are the only way to weak types.
            scalar = jnp.asarray(array.dtype.type(0).item())
            if scalar.dtype == array.dtype:
                array = jnp.broadcast_to(scalar, array.shape).at[...].set(array)
    return array
