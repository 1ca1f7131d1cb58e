"""Local paths and URLs of object stores.

A URL stays a string with its two slashes: `os.path` and `pathlib` turn `gs://bucket` into
`gs:/bucket`, a local path.
"""

import os
import re

from jstep.core.checks import describe_type

SCHEMES = ("gs", "s3")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]")


def is_url(path: object) -> bool:
    return isinstance(path, str) and path.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def location(given: object, name: str) -> str:
    """Return a path with `~` expanded, or a validated URL without a trailing slash.

    It may have `__fspath__`, such as `etils.epath.Path`; `name` is for errors.
    """
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str):
        raise TypeError(f"{name}={given!r}: must be a path or a URL, got {describe_type(given)}")
    if not path:
        raise ValueError(f"{name}='': must name a directory")
    match = _SCHEME.match(path)
    if match is None:
        if re.match(rf"(?:{'|'.join(SCHEMES)}):(?:/|$)", path, re.IGNORECASE):
            raise ValueError(
                f"{name}={path!r}: must have two slashes after the scheme; pass the URL as a string"
            )
        return os.path.expanduser(path)
    scheme = match[1].lower()
    name_and_key = path[match.end() :]
    bucket, *parts = name_and_key.split("/")
    if scheme not in SCHEMES:
        problem = (
            f"must be a path, gs://… or s3://…, got the scheme {scheme!r}; mount other "
            "stores as a file system"
        )
    elif "@" in bucket:
        problem = (
            "must be a bucket, got a URL with credentials; leave them where the "
            "cloud's own tools keep them"
        )
    elif not _BUCKET.fullmatch(bucket):
        problem = f"must name a bucket, as in {scheme}://bucket/run, got {bucket!r}"
    elif {".", ".."} & set(parts) or any(c in name_and_key for c in "\0\r\n"):
        problem = "must not contain '.', '..' or line breaks: keys are not paths"
    else:
        return "/".join([f"{scheme}://{bucket}", *filter(None, parts)])
    # What precedes an @ may be a password.
    shown = "…" if "@" in name_and_key else name_and_key
    raise ValueError(f"{name}={f'{scheme}://{shown}'!r}: {problem}")


def parts_of_url(url: str) -> tuple[str, str, str]:
    """Return the scheme, the bucket, and the key."""
    scheme, _, name_and_key = url.partition("://")
    bucket, _, key = name_and_key.partition("/")
    return scheme, bucket, key


def join_path(path: str, *parts: str) -> str:
    return "/".join([path.rstrip("/"), *parts]) if is_url(path) else os.path.join(path, *parts)


def split_path(path: str) -> tuple[str, str]:
    """Split off the last name of a path or URL; it is empty for a bucket."""
    if not is_url(path):
        return os.path.split(path)
    scheme, bucket, key = parts_of_url(path)
    parent, _, name = key.rstrip("/").rpartition("/")
    return f"{scheme}://{bucket}/{parent}" if parent else f"{scheme}://{bucket}", name


def absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)


def resolve_path(path: str) -> str:
    """Return the absolute form of a path without links; a URL is unchanged."""
    return path if is_url(path) else os.path.realpath(path)
