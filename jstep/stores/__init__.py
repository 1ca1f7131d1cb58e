"""Access to local paths and URLs of object stores. Independent of checkpoints and event files.

tensorstore is imported when the first URL is used.
"""

from jstep.stores.errors import StoreError, TruncatedError
from jstep.stores.files import is_directory, names_in, new_file, opened, replace_file, sync_folder, walked
from jstep.stores.growing import LocalLines, ObjectAppender, ObjectLines, open_lines
from jstep.stores.objects import ABSENT, Directory, Objects, Pending, ReadResult, at_once
from jstep.stores.urls import absolute, is_url, join, location, split

__all__ = [
    "ABSENT",
    "Directory",
    "LocalLines",
    "ObjectAppender",
    "ObjectLines",
    "Objects",
    "Pending",
    "ReadResult",
    "StoreError",
    "TruncatedError",
    "absolute",
    "at_once",
    "is_directory",
    "is_url",
    "join",
    "location",
    "names_in",
    "new_file",
    "open_lines",
    "opened",
    "replace_file",
    "split",
    "sync_folder",
    "walked",
]
