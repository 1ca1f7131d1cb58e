"""Links of README for a package index, where links relative to the checkout would be dead."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def with_absolute_links(text: str, source: str) -> str:
    """Return a text with links to the files of the repository at the URL `source`.

    Pictures link to the raw files.
    """

    def absolute(link: re.Match[str]) -> str:
        is_picture, words, path = link.groups()
        return f"{is_picture}[{words}]({source}/{'raw' if is_picture else 'blob'}/main/{path})"

    return LINK.sub(absolute, text)


class CustomMetadataHook(MetadataHookInterface):
    """The dynamic field `readme`."""

    def update(self, metadata: dict) -> None:  # type: ignore[type-arg]
        """Set the field."""
        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
