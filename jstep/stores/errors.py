"""What a store's answers mean to a user: the bucket, the operation and the way out, and never a secret.

tensorstore says it all in one ValueError, whose text begins with a status word and ends with the answer's body. That
text is not passed on: bodies repeat keys and signatures.
"""

import re

from jstep.stores import aws, urls

_RIGHTS = {
    "gs": {"read": "storage.objects.get", "list": "storage.objects.list", "delete": "storage.objects.delete"},
    "s3": {"read": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"},
}
_WRITE = {"gs": "storage.objects.create and storage.objects.delete (to replace one)", "s3": "s3:PutObject"}
_LOGIN = {
    "gs": "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; temporary keys end after some hours",
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_UNKNOWN_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure", "UnrecognizedClientException"}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_ENDPOINT = {
    "gs": "TENSORSTORE_GCS_HTTP_URL, where it is set",
    "s3": "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and AWS_REGION, where they are set",
}


class StoreError(OSError):
    """A store did not do what it was asked, after all the retries there are: too busy, or an answer without a name."""


class BusyError(StoreError):
    """A store took nothing for half a minute: 429 and 5xx, again and again."""


class TruncatedError(StoreError):
    """An object is shorter than the bytes that were asked of it."""


def translated(error: Exception, verb: str, url: str) -> OSError:
    """The error to raise `from None` in place of tensorstore's.

    Args:
        error: What tensorstore raised.
        verb: What was asked: read, write, delete, list or open.
        url: Of the object or of the directory.
    """
    text = str(error)
    scheme, bucket, _ = urls.bucket(url)
    what = f"{url}: cannot {verb}"
    codes = re.findall(r"\[http_response_code='([0-9]+)'\]", text)
    status = int(codes[-1]) if codes else 0
    code = _code(text)
    said = " ".join(str(part) for part in (status or "", code) if part)
    if status == 416 or text.startswith("OUT_OF_RANGE"):
        return TruncatedError(f"{url}: it is shorter than it was")
    if code in _REGION or status in (301, 307):
        return StoreError(f"{what}: the bucket is in another region ({said}); set AWS_REGION to that of the bucket")
    if code in _EXPIRED | _UNKNOWN_KEYS or status == 401:
        expired = "credentials that have ended" if code in _EXPIRED else "no valid credentials"
        return PermissionError(f"{what}: {expired} ({said}): {_LOGIN[scheme]}")
    if status == 403 or text.startswith("PERMISSION_DENIED"):
        right = _RIGHTS[scheme].get(verb, _WRITE[scheme])
        return PermissionError(
            f"{what}: not permitted ({said or 'PERMISSION_DENIED'}). It takes the right {right} on the bucket "
            f"{bucket!r}; other credentials come from {_LOGIN[scheme]}"
        )
    if code == "NoSuchBucket" or (status == 404 and verb != "read"):
        return no_bucket(url, verb)
    if (curl := re.search(r"CURL error ([^:\[]*)", text)) is not None:
        host = re.search(r"(?:Failed to connect to|resolve host:) ([^\s\[]+)(?: port ([0-9]+))?", text)
        where = ":".join(part for part in host.groups() if part) if host else f"the host of {scheme}://{bucket}"
        return ConnectionError(
            f"{what}: {curl[1].strip()} ({where}), tried for half a minute. Is there a network, and is the address "
            f"right: {_ENDPOINT[scheme]}"
        )
    if status:
        tries = re.search(r"All ([0-9]+) retry attempts", text)
        after = f", {int(tries[1]) + 1} tries in half a minute" if tries else ""
        if tries or status == 429 or status >= 500:
            return BusyError(
                f"{what}: the store did not take it (HTTP {said}{after}). It is busy or down; run again when it answers"
            )
        # S3 answers so where temporary keys have ended, and says it in a body that a HEAD has not.
        hint = f"; have the credentials ended? {_LOGIN[scheme]}" if status == 400 else "; its own log says why"
        return StoreError(f"{what}: the store did not take it (HTTP {said}){hint}")
    return StoreError(f"{what}: {scrubbed(text)}")


def no_bucket(url: str, verb: str) -> FileNotFoundError:
    """The error for a bucket that is not there."""
    scheme, bucket, _ = urls.bucket(url)
    tool = {"gs": f"gcloud storage buckets create gs://{bucket}", "s3": f"aws s3 mb s3://{bucket}"}[scheme]
    return FileNotFoundError(
        f"{url}: cannot {verb}: there is no bucket {bucket!r}; make it (`{tool}`), or mend the name"
    )


def no_answer(url: str, verb: str, seconds: float, known: str | None = None) -> OSError:
    """The error for a store that says nothing at all, or has not after what is known of it already."""
    if known is not None:
        return ConnectionError(f"{url}: cannot {verb}: {known}")
    scheme, bucket, _ = urls.bucket(url)
    return ConnectionError(
        f"{url}: cannot {verb}: the store of {scheme}://{bucket} gave no answer in {seconds:.0f} s. Is there a "
        f"network, and is the address right: {_ENDPOINT[scheme]}"
    )


def _code(text: str) -> str:
    found = re.search(r"<Code>(\w{1,60})</Code>", text)
    if found is None:  # the driver puts the code before the message
        found = re.match(r"(?:[A-Z_]+: )?(?:All [0-9]+ retry attempts failed: )?([A-Z][A-Za-z]{3,60})\b", text)
        return found[1] if found and found[1] in _EXPIRED | _UNKNOWN_KEYS | _REGION | {"NoSuchBucket"} else ""
    return found[1]


def scrubbed(text: str) -> str:
    """A text that is short and holds no secret: no answer's body, no value of a variable with credentials."""
    text = re.split(r"\s*\[(?:http_response_body|source locations)", text)[0].split("\n")[0]
    for secret in aws.secrets():
        text = text.replace(secret, "…")
    text = re.sub(r"(?i)(authorization|signature|token|secret|password)([\"']?\s*[:=]\s*)\S+", r"\1\2…", text)
    return text[:200]
