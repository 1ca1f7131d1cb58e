"""`merge` of the command line."""

import argparse
import json
from collections.abc import Callable

from jstep.tools.cli import Command, answer


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN", help="the directory of the checkpoints, or its URL")
    steps = "the steps A, A+C, … up to B; without C all that are kept from A to B; by default all that are kept"
    parser.add_argument("--steps", metavar="A:B[:C]", help=steps)
    parser.add_argument("--decay", default="linear", metavar="NAME", help="linear (default), 1-sqrt or cosine")
    parser.add_argument("--prefix", default="model", help="the prefix of the checkpoints (default: model)")
    averages = "merge the moving averages, or those in a slot"
    parser.add_argument("--use-averages", nargs="?", const=True, default=False, metavar="SLOT", help=averages)
    parser.add_argument("-o", "--output", required=True, metavar="OUT.safetensors", help="the file to write")


def _run(arguments: argparse.Namespace) -> int:
    # These import JAX, which `--help` does not need.
    from jstep.checkpoint.merge import decay_weights, merge_checkpoints, steps_to_merge
    from jstep.checkpoint.names import as_prefix, check_directory
    from jstep.checkpoint.open_store import open_store
    from jstep.tools.runs import directory_of_runs, runs
    from jstep.weights.save import save_weights

    directory, prefix = arguments.directory, as_prefix(arguments.prefix)
    store = open_store(check_directory(directory), prefix)
    none = next(store.newest_first(prefix), None) is None
    if none and (sentence := directory_of_runs(store.directory, runs(store.directory))):
        raise ValueError(sentence)
    steps = steps_to_merge(store, prefix, _steps(arguments.steps, lambda: steps_to_merge(store, prefix, None)))
    weights = decay_weights(steps, arguments.decay)
    options = {"decay": arguments.decay, "prefix": prefix, "use_averages": arguments.use_averages}
    params = merge_checkpoints(directory, steps, **options)
    about = {
        "steps": steps,
        "weights": weights,
        "decay": arguments.decay,
        "directory": store.directory,
        "prefix": prefix,
    }
    path = save_weights(arguments.output, params, metadata={"merged": json.dumps(about)})
    lines = [f"{prefix}-{step}  {weight:.6g}" for step, weight in zip(steps, weights, strict=True)]
    return answer(arguments, {"path": str(path), **about}, [*lines, str(path)])


def _steps(text: str | None, kept: Callable[[], list[int]]) -> list[int] | None:
    """The steps that an argument names; None for all."""
    if text is None:
        return None
    try:
        first, last, *stride = numbers = [int(part) for part in text.split(":")]
        if len(numbers) > 3 or min(numbers) < 0 or 0 in stride or last < first:
            raise ValueError
    except ValueError:
        raise ValueError(f"--steps {text}: must be A:B or A:B:C, such as 80000:100000:2000") from None
    return list(range(first, last + 1, stride[0])) if stride else [step for step in kept() if first <= step <= last]


MERGE = Command(_add_arguments, _run)
