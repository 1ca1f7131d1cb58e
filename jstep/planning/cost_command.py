"""`cost` of the command line: an estimate of the cost of a train step, without running it."""

import argparse
import importlib
import os
import sys
from types import ModuleType
from typing import Any

from jstep.core.checks import describe_type
from jstep.look.cli import Command, answer


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "program",
        metavar="PROGRAM:FUNCTION",
        help="a file (train.py:step_and_shapes) or a module (my.train:step_and_shapes); the "
        "function takes no arguments and returns (train_step, state, *batch) as arrays or shapes",
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="the devices to compile for, such as v5e:16x16, v5e:4x4*2 or h100:4x8: data parallel "
        "over all of them. For another layout, let the function place state and batch on a mesh of "
        "jstep.topology",
    )


def _print_cost(arguments: argparse.Namespace) -> int:
    place, separator, function = arguments.program.rpartition(":")
    if not (place and separator and function):
        raise ValueError(
            f"{arguments.program!r}: must be PROGRAM:FUNCTION, such as train.py:step_and_shapes"
        )
    if place.endswith(".py") and not os.path.isfile(place):
        raise FileNotFoundError(f"no file {place}")
    # These import JAX, which --help and the errors above do not need.
    from jstep.core.placement import device_of
    from jstep.planning.cost import cost
    from jstep.planning.topologies import check_compiler, parse_topology, prepare, topology_name

    topology = (
        None if arguments.topology is None else parse_topology(arguments.topology, "--topology")
    )
    if topology is not None:
        check_compiler(topology)
        # Before the program uses JAX, which would otherwise warn on stderr that the compilers lack
        # devices.
        prepare()
    step, state, *batch = _call(place, function)
    is_placed = topology_name(device_of((state, batch))) == topology
    # A function that has placed state and batch on the topology itself is left as it is.
    result = cost(
        step, state, *batch, topology=None if topology is None or is_placed else str(topology)
    )
    # The exit code is 0 even if the step does not fit into memory.
    return answer(arguments, vars(result), [str(result)])


def _call(place: str, name: str) -> Any:
    program = f"{place}:{name}"
    function = getattr(_import(place), name, None)
    if not callable(function):
        raise ValueError(f"{program!r}: {place} has no function {name!r}")
    result = function()
    if not isinstance(result, tuple | list) or len(result) < 2:
        raise ValueError(
            f"{program!r}: must return (train_step, state, *batch), returned "
            f"{describe_type(result)}"
        )
    return result


def _import(place: str) -> ModuleType:
    """Import a file or module as `python` does: its or the current directory first on the path."""
    if not os.path.isfile(place):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
    name = os.path.splitext(os.path.basename(place))[0]
    if "." in name or name in sys.modules:
        raise ValueError(
            f"{place}: must not have a dot in its name, nor the name of another module; rename it"
        )
    return importlib.import_module(name)


COST = Command(_add_arguments, _print_cost)
