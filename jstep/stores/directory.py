"""A directory of objects with reliable lists, thanks to a mark: an object that sorts after all others.

tensorstore's gs:// driver returns an empty list for HTTP status 401, 403 or 404, and a truncated one if a later page
fails so. A run whose token has expired would find no checkpoint, start from step 0, and then delete old data. A
list that does not end in the mark is therefore rejected.
"""

import logging

from jstep.stores.objects import ABSENT, Objects

MARK = "~jstep"
"""Sorts after all letters, digits and punctuation of ASCII."""
LAST = "\U0010fffd~jstep"
"""The mark for keys that sort after `MARK`: prefixes that begin with non-ASCII letters."""

_logger = logging.getLogger("jstep")


class Directory(Objects):
    """The objects below a URL, with the mark."""

    def mark(self, last: str = "") -> None:
        """Write the mark for keys up to `last`, if it does not exist yet.

        Raises:
            FileNotFoundError: There is no such bucket.
            OSError: The directory cannot be read or written.
        """
        for mark in [MARK] if last < MARK else [MARK, LAST]:
            if self.read(mark).data is None:
                self.write_if(mark, b"", ABSENT)

    def listing(self, start: str = "") -> list[str]:
        """Return all keys from `start` on, in order, without the marks.

        A directory without a mark is a copy, or one to which no Saver has written yet: its list is accepted if a
        second request returns the same.

        Raises:
            PermissionError: The list is empty or truncated, although the directory has its mark.
            OSError: The store cannot be read.
        """
        keys = self.list(start)
        if not self._ends(keys, start):
            marked = self.read(MARK).data is not None
            again = self.list(start) if marked or keys else keys
            if not self._ends(again, start):
                if marked or again != keys:
                    raise PermissionError(
                        f"{self.url}: cannot list, or the list is truncated. The credentials may have expired, or lack "
                        f"the right storage.objects.list or s3:ListBucket; if they have it, {self.at(MARK)} is "
                        "corrupted: delete it, and the next save writes it again"
                    )
                if keys:
                    _logger.info("%s has no %s: it was copied without it, and its list is accepted", self.url, MARK)
            keys = again
        return [key for key in keys if key not in (MARK, LAST)]

    @staticmethod
    def _ends(keys: list[str], start: str) -> bool:
        beyond = start > MARK or any(key > MARK for key in keys)
        return (LAST if beyond else MARK) in keys
