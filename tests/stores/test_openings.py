"""Which modules open files by themselves, without the functions of `stores/files.py`."""

import ast
import re

from source_files import MODULES, nodes_of, text_of

OPENS = {
    "stores.files": "the functions that the others use",
    "showing.drawing": "a file of the package",
    "core.logs": "the two ends of a pipe",
    "core.public_names": "a file of the package",
    "core.stopwatch": "/proc",
    "planning.topologies": "files of the package and of CUDA",
    "record.code": "files of the program",
    "debug.replay": "a temporary folder of this process",
    "debug.verify_resume": "a temporary folder of this process",
    "look.cli": "/dev/null",
    "look.report": "a file of the package",
    "watching.record_numbers": "/proc",
    "watching.utilization": "a file of the package",
    "optimizers.muon": "a file of the package",
    "record.starts": "a new file, and none if there is one",
    "stores.owners": "/proc",
    "summary.new_event_files": "a new file, and an error if there is one",
    "weights.save": "a copy to a temporary file of its own",
}
"""The modules that open files by themselves, and which."""
_OPENING = re.compile(
    r"open|io\.open|os\.(open|mkfifo|link|symlink|truncate)|tempfile\.\w+|shutil\.(copy\w*|move)"
    r"|.*\.(read|write)_(text|bytes)"
)
_WORDS = re.compile(r"open|mkfifo|link|truncate|tempfile|shutil|(read|write)_(text|bytes)")
"""A module without any of these words does not need to be parsed."""


def test_files_are_opened_by_the_functions_that_check_them():
    """Somebody else may have made them: `open_own` writes no other file, and `open_regular` reads
    no FIFO or device."""
    opening = {
        module
        for module, path in MODULES.items()
        if _WORDS.search(text_of(path))
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and _OPENING.fullmatch(ast.unparse(node.func))
    }
    assert opening <= OPENS.keys(), "use a function of stores/files.py"
    assert "stores.files" in opening
