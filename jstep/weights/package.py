"""The `safetensors` package: the reference that has to agree with what is read and written here."""

from collections.abc import Iterable
from typing import Any


def confirm(paths: Iterable[str]) -> None:
    """Has the package open files that were checked or written here, which reads their headers alone.

    Raises:
        ImportError: It is not installed.
        ValueError: It refuses a file.
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
    """The package.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("weights need the safetensors package: pip install 'jstep[weights]'") from error
    return safetensors
