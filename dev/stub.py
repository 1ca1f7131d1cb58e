"""Writes `jstep/__init__.pyi`, for type checkers and editors, from the list of names in
`jstep/__init__.py`.

.venv/bin/python dev/stub.py
"""

import pathlib

import jstep


def stub() -> str:
    """Return the text of the stub."""
    lines = [
        f"from {module} import {name} as {name}" for name, module in sorted(jstep._EXPORTS.items())
    ]
    head = "# Written by dev/stub.py from the list in __init__.py.\n"
    return head + "\n".join(sorted(lines)) + "\n\n__version__: str\n__all__: list[str]\n"


if __name__ == "__main__":
    (pathlib.Path(jstep.__file__).parent / "__init__.pyi").write_text(stub(), encoding="utf-8")
