r"""Typesets equations when the site is built: a hook of MkDocs.

`pymdownx.arithmatex` finds `$…$` and `$$…$$`, and this makes MathML of them, which browsers show by
themselves: no script, no fonts, and nothing that is fetched from another host.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FOUND = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_page_content(content: str, **kwargs: Any) -> str:
    """The page with MathML where it had TeX."""
    return _FOUND.sub(_typeset, content)


def _typeset(match: re.Match[str]) -> str:
    tex = html.unescape(match[2]).strip()
    is_block = match[1] == "div"
    try:
        made = convert(tex, display="block" if is_block else "inline")
    except Exception as error:  # latex2mathml has no base class of its errors
        raise ValueError(f"docs: this equation cannot be typeset: {tex}") from error
    if "\\" in html.unescape(re.sub(r"<[^>]*>", "", made)):
        raise ValueError(f"docs: latex2mathml left a command of this equation as it was: {tex}")
    made = made.replace("<math ", f'<math aria-label="{html.escape(tex)}" ', 1)
    return f'<div class="equation">{made}</div>' if is_block else made
