"""Lazy imports of TensorBoard's protos, of the CRC-32C in C, and of Pillow.

Writing imports only `tensorboard.compat.proto`, which contains message classes: tensorboard's own writer uses
`tensorboard.compat.tf`, which imports TensorFlow if it is installed.
"""

import functools
import importlib
import types
from typing import Any

_HOME = {
    "AttrValue": "attr_value_pb2",
    "Event": "event_pb2",
    "GraphDef": "graph_pb2",
    "HistogramProto": "summary_pb2",
    "NodeDef": "node_def_pb2",
    "SessionLog": "event_pb2",
    "Summary": "summary_pb2",
    "SummaryMetadata": "summary_pb2",
    "TensorProto": "tensor_pb2",
    "TensorShapeProto": "tensor_shape_pb2",
    "types": "types_pb2",
}


def _import(module: str, what: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {module.split('.')[0]}, which could not be imported ({error}): pip install jstep[summaries]"
        ) from error


@functools.cache
def proto(name: str) -> Any:
    """Return a message class by name, such as `proto("Event")`; for "types", the module of enums."""
    module = _import(f"tensorboard.compat.proto.{_HOME[name]}", "an event file")
    return module if name == "types" else getattr(module, name)


@functools.cache
def decode_error() -> type[Exception]:
    """Return the exception that protobuf raises for bytes that are not a message."""
    error: type[Exception] = _import("google.protobuf.message", "an event file").DecodeError
    return error


@functools.cache
def hparams_protos() -> tuple[Any, Any]:
    """Return the modules of TensorBoard's HParams messages: `api_pb2` and `plugin_data_pb2`."""
    home = "tensorboard.plugins.hparams."
    what = "add_hparams"
    return _import(home + "api_pb2", what), _import(home + "plugin_data_pb2", what)


@functools.cache
def crc32c() -> Any:
    """Return a function from bytes to their CRC-32C as an int, computed in C."""
    return _import("google_crc32c", "an event file").value


@functools.cache
def pillow_image() -> Any:
    """Return Pillow's `Image` module; Pillow is a dependency of tensorboard."""
    return _import("PIL.Image", "an image summary")


def is_message(x: Any, name: str) -> bool:
    """Whether x is a proto message of this name, from tensorboard or from TensorFlow."""
    descriptor = getattr(x, "DESCRIPTOR", None)
    return getattr(descriptor, "full_name", "").rpartition(".")[2] == name and hasattr(x, "SerializeToString")
