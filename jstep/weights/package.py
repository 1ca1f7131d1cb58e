"""The `safetensors` package, the reference implementation that must accept all files read and written here."""

from collections.abc import Iterable
from typing import Any


def confirm(paths: Iterable[str]) -> None:
    """Open files with the package, which reads only their headers.

    Raises:
        ImportError: The package is not installed.
        ValueError: The package refuses a file.
    """
    safetensors = package()
    for path in paths:
        try:
            with safetensors.safe_open(path, framework="numpy"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path}: the safetensors package {safetensors.__version__} refuses it: {error}; a newer version may "
                "know its dtypes: pip install -U safetensors"
            ) from None


def package() -> Any:
    """Import the package.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("weights need the safetensors package: pip install 'jstep[weights]'") from error
    return safetensors
