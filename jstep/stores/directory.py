"""A directory of objects whose lists can be believed, for it has a mark that sorts after everything else in it.

tensorstore's gs:// driver makes an empty list of an answer 401, 403 or 404, and a short one where that is the answer
for a later page. A run whose token has expired would find no checkpoint, start from step 0, and then tidy up. With
the mark a list that does not end in it is no list.
"""

import logging

from jstep.stores.objects import ABSENT, Objects

MARK = "~jstep"
"""Sorts after all letters, digits and punctuation of ASCII."""
LAST = "\U0010fffd~jstep"
"""The mark for what sorts after `MARK`: prefixes that begin with other letters."""

_logger = logging.getLogger("jstep")


class Directory(Objects):
    """Objects below a URL, with the mark."""

    def mark(self, last: str = "") -> None:
        """Puts the mark, where it is not there yet, for keys up to `last`.

        Raises:
            FileNotFoundError: There is no such bucket.
            OSError: The directory cannot be read or written.
        """
        for mark in [MARK] if last < MARK else [MARK, LAST]:
            if self.read(mark).data is None:
                self.write_if(mark, b"", ABSENT)

    def listing(self, start: str = "") -> list[str]:
        """All keys from one on, in order, the marks left out.

        A directory without a mark is one that nothing was written to by a Saver yet, or a copy: its list is believed
        where a second one says the same.

        Raises:
            PermissionError: The list is empty or cut short, and the directory has its mark.
            OSError: The store cannot be read.
        """
        keys = self.list(start)
        if not self._ends(keys, start):
            marked = self.read(MARK).data is not None
            again = self.list(start) if marked or keys else keys
            if not self._ends(again, start):
                if marked or again != keys:
                    raise PermissionError(
                        f"{self.url}: cannot list, or not to the end. The credentials may have expired, or lack the "
                        f"right storage.objects.list or s3:ListBucket; if they have it, {self.at(MARK)} is damaged: "
                        "delete it, and a Saver's next save writes it anew"
                    )
                if keys:
                    _logger.info("%s has no %s: it was copied without, and its list is believed", self.url, MARK)
            keys = again
        return [key for key in keys if key not in (MARK, LAST)]

    @staticmethod
    def _ends(keys: list[str], start: str) -> bool:
        beyond = start > MARK or any(key > MARK for key in keys)
        return (LAST if beyond else MARK) in keys
