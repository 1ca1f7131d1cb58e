"""Translation of tensorstore's errors: they name the bucket, the operation and what to do, and never a secret.

tensorstore raises one ValueError for everything: its message begins with a status word and ends with the body of the
response. That message is not passed on, since bodies contain keys and signatures.
"""

import os
import re

from jstep.stores.urls import parts_of_url

_RIGHTS = {
    "gs": {"read": "storage.objects.get", "list": "storage.objects.list", "delete": "storage.objects.delete"},
    "s3": {"read": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"},
}
_WRITE = {"gs": "storage.objects.create and storage.objects.delete (to replace one)", "s3": "s3:PutObject"}
_LOGIN = {
    "gs": "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; temporary keys expire after some hours",
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_UNKNOWN_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure", "UnrecognizedClientException"}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
ENDPOINT = {
    "gs": "TENSORSTORE_GCS_HTTP_URL, if it is set",
    "s3": "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and AWS_REGION, if they are set",
}


class StoreError(OSError):
    """A request to a store failed after all retries: the store is too busy, or the error is unknown."""


class BusyError(StoreError):
    """A store accepted no request for half a minute (429 and 5xx)."""


class TruncatedError(StoreError):
    """An object is shorter than the requested range of bytes."""


def translated(error: Exception, verb: str, url: str) -> OSError:
    """Return the error to raise `from None` in place of tensorstore's.

    Args:
        error: The error of tensorstore.
        verb: The operation: read, write, delete, list or open.
        url: The URL of the object or the directory.
    """
    text = str(error)
    scheme, bucket, _ = parts_of_url(url)
    what = f"{url}: cannot {verb}"
    codes = re.findall(r"\[http_response_code='([0-9]+)'\]", text)
    status = int(codes[-1]) if codes else 0
    code = _code(text)
    details = " ".join(str(part) for part in (status or "", code) if part)
    if status == 416 or text.startswith("OUT_OF_RANGE"):
        return TruncatedError(f"{url}: it is shorter than it was")
    if code in _REGION or status in (301, 307):
        return StoreError(f"{what}: the bucket is in another region ({details}); set AWS_REGION to that of the bucket")
    if code in _EXPIRED | _UNKNOWN_KEYS or status == 401:
        expired = "the credentials have expired" if code in _EXPIRED else "no valid credentials"
        return PermissionError(f"{what}: {expired} ({details}): {_LOGIN[scheme]}")
    if status == 403 or text.startswith("PERMISSION_DENIED"):
        right = _RIGHTS[scheme].get(verb, _WRITE[scheme])
        return PermissionError(
            f"{what}: not permitted ({details or 'PERMISSION_DENIED'}). It needs the right {right} on the bucket "
            f"{bucket!r}; for other credentials, use {_LOGIN[scheme]}"
        )
    if code == "NoSuchBucket" or (status == 404 and verb != "read"):
        return no_bucket(url, verb)
    if (curl := re.search(r"CURL error ([^:\[]*)", text)) is not None:
        host = re.search(r"(?:Failed to connect to|resolve host:) ([^\s\[]+)(?: port ([0-9]+))?", text)
        where = ":".join(part for part in host.groups() if part) if host else f"the host of {scheme}://{bucket}"
        return ConnectionError(
            f"{what}: {curl[1].strip()} ({where}), tried for half a minute. Check the network and the address: "
            f"{ENDPOINT[scheme]}"
        )
    if status:
        tries = re.search(r"All ([0-9]+) retry attempts", text)
        after = f", {int(tries[1]) + 1} tries in half a minute" if tries else ""
        if tries or status == 429 or status >= 500:
            return BusyError(
                f"{what}: the store did not accept it (HTTP {details}{after}). It is busy or down; run again later"
            )
        # S3 returns 400 for expired temporary keys, and gives the reason only in a body, which a HEAD lacks.
        hint = f"; have the credentials expired? {_LOGIN[scheme]}" if status == 400 else "; see the log of the store"
        return StoreError(f"{what}: the store did not accept it (HTTP {details}){hint}")
    return StoreError(f"{what}: {redact(text)}")


def no_bucket(url: str, verb: str) -> FileNotFoundError:
    """Return the error for a missing bucket."""
    scheme, bucket, _ = parts_of_url(url)
    tool = {"gs": f"gcloud storage buckets create gs://{bucket}", "s3": f"aws s3 mb s3://{bucket}"}[scheme]
    return FileNotFoundError(
        f"{url}: cannot {verb}: there is no bucket {bucket!r}; create it (`{tool}`), or correct the name"
    )


def _code(text: str) -> str:
    found = re.search(r"<Code>(\w{1,60})</Code>", text)
    if found is None:  # the driver puts the code before the message
        found = re.match(r"(?:[A-Z_]+: )?(?:All [0-9]+ retry attempts failed: )?([A-Z][A-Za-z]{3,60})\b", text)
        return found[1] if found and found[1] in _EXPIRED | _UNKNOWN_KEYS | _REGION | {"NoSuchBucket"} else ""
    return found[1]


def redact(text: str) -> str:
    """Shorten an error message and remove secrets: response bodies, and values of variables with credentials."""
    text = re.split(r"\s*\[(?:http_response_body|source locations)", text)[0].split("\n")[0]
    words = ("SECRET", "TOKEN", "PASSWORD", "ACCESS_KEY", "CREDENTIAL")
    for key, value in os.environ.items():
        if len(value) >= 4 and any(word in key.upper() for word in words):
            text = text.replace(value, "…")
    text = re.sub(r"(?i)(authorization|signature|token|secret|password)([\"']?\s*[:=]\s*)\S+", r"\1\2…", text)
    return text[:200]
