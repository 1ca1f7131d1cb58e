"""`text`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jstep.summary.collected import DEFAULT, register
from jstep.summary.values import Summary, Text, check_tag


def text(tag: str, text: Any, collections: Sequence[str] | None = DEFAULT) -> Summary:
    """Makes a summary of text, which TensorBoard's Text tab renders as Markdown.

    The text is static: inside a compiled function it is what it was when the function was traced.

    Args:
        tag: Its name.
        text: A string, or a list or table (rank 1 or 2) of strings.
        collections: The collections to put it in; None for the default one, () for none.

    Returns:
        A `Summary` with no leaves.

    Raises:
        TypeError: The text is no string and no list or table of strings.

    Example:
        >>> import jstep.summary
        >>> jstep.summary.text("config", "learning rate **0.1**")
        Summary('config')
    """
    check_tag(tag, "text")
    try:
        strings = np.asarray(text, dtype=object)
    except ValueError:
        strings = np.asarray(None)
    flat = tuple(strings.ravel().tolist())
    if strings.ndim > 2 or not all(isinstance(s, str) for s in flat):
        raise TypeError(
            f"text {tag!r}: expected a str, or a list or table of them with rows of one length, "
            f"not {type(text).__name__} {text!r}"
        )
    part = Text((tag,), strings.shape, flat)
    register(part, collections)
    return Summary((part,))
