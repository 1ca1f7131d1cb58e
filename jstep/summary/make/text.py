"""Text summaries."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jstep.summary.collected import DEFAULT, register
from jstep.summary.values import Summary, Text, check_tag


def text(tag: str, text: Any, collections: Sequence[str] | None = DEFAULT) -> Summary:
    """Return a summary of strings, which TensorBoard's Text tab renders as Markdown.

    The strings are static: inside a compiled function they are those of the trace.

    Args:
        tag: The tag.
        text: A string, or a list or table (rank 1 or 2) of strings.
        collections: The collections to add the summary to; None for the default one, () for none.

    Returns:
        A `Summary` without leaves.

    Raises:
        TypeError: `text` is not a string or a list or table of strings.

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
