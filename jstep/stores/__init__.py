"""Access to local paths and URLs of object stores. Independent of checkpoints and event files.

tensorstore is imported when the first URL is used.
"""

from jstep.stores.appender import ObjectAppender
from jstep.stores.directory import Directory
from jstep.stores.errors import StoreError, TruncatedError
from jstep.stores.files import is_directory, names_in, opened, walked
from jstep.stores.objects import ABSENT, Objects, Pending, ReadResult
from jstep.stores.urls import absolute, is_url, join, location, split

__all__ = [
    "ABSENT",
    "Directory",
    "ObjectAppender",
    "Objects",
    "Pending",
    "ReadResult",
    "StoreError",
    "TruncatedError",
    "absolute",
    "is_directory",
    "is_url",
    "join",
    "location",
    "names_in",
    "opened",
    "split",
    "walked",
]
