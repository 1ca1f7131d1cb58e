"""A fake S3 for faults: what tensorstore uses, ETags and conditional writes, unsigned.

moto implements much more of S3, and other tests use it as a reference, but it cannot inject
failures.
"""

import hashlib
from xml.sax.saxutils import escape

from http_store import HttpStore

_CODES = {
    403: "AccessDenied",
    404: "NoSuchBucket",
    503: "SlowDown",
    500: "InternalError",
    429: "TooManyRequests",
}


class FakeS3(HttpStore):
    code = None
    """The error code in the body of injected failures; None for the usual one of the status."""

    def environment(self):
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
            "AWS_SECRET_ACCESS_KEY": "very-secret-very-secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def failure(self, status):
        code = self.code or _CODES.get(status, "Injected")
        body = (
            f"<Error><Code>{code}</Code><Message>of AKIATESTTESTTEST, "
            "very-secret-very-secret</Message></Error>"
        )
        return status, body.encode(), {}

    def respond(self, method, path, query, headers, body):
        _, bucket, *rest = path.split("/", 2)
        key = rest[0] if rest else ""
        if bucket not in self.objects:
            return self.failure(404)
        if not key:
            return self.list(bucket, query)
        current = self.objects[bucket].get(key)
        tag = current and f'"{hashlib.md5(current[1]).hexdigest()}"'
        if headers.get("If-None-Match") in ("*", tag) and current is not None:
            return (412, b"", {}) if method in ("PUT", "DELETE") else (304, b"", {})
        if current is None and (method in ("GET", "HEAD") or "If-Match" in headers):
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        if "If-Match" in headers and headers["If-Match"] != tag:
            return 412, b"", {}
        if method == "PUT":
            self.put(bucket, key, body)
            return 200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        if method == "DELETE":
            self.objects[bucket].pop(key, None)
            return 204, b"", {}
        return self.part(current[1], headers, {"ETag": tag})

    def list(self, bucket, query):
        first = max(query.get("start-after", ""), query.get("continuation-token", ""))
        names = [name for name in self.keys(query.get("prefix", ""), bucket) if name > first]
        shown = names[: self.page]
        more = len(names) > len(shown)
        body = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>1</Size></Contents>" for name in shown
        )
        token = (
            f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
        )
        text = (
            "<?xml version='1.0' "
            f"encoding='UTF-8'?><ListBucketResult><KeyCount>{len(shown)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{body}</ListBucketResult>"
        )
        return 200, text.encode(), {}
