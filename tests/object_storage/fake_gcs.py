"""A fake GCS: what tensorstore's driver uses of its JSON API, generations and preconditions.

The emulators on PyPI ignore preconditions. This one was compared with Google's storage-testbench,
which is not on PyPI.
"""

import json
import re

from http_store import HttpStore


class FakeGCS(HttpStore):
    """Google's JSON API; `token` is the only accepted token, or None to accept any."""

    def __init__(self, buckets=("bkt",), page=1000, token=None):
        self.token = token
        super().__init__(buckets, page)

    def environment(self):
        return {"TENSORSTORE_GCS_HTTP_URL": self.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "testing"}

    def respond(self, method, path, query, headers, body):
        if self.token is not None and headers.get("Authorization") != f"Bearer {self.token}":
            return self.failure(401)
        match = re.fullmatch(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?", path, re.DOTALL)
        if match is None:
            return self.failure(400)
        bucket, key = match[1], match[2] or query.get("name")
        if bucket not in self.objects:
            return self.failure(404)
        if key is None:
            return self.list(self.objects[bucket], query)
        current = self.objects[bucket].get(key)
        if (
            method == "GET"
            and current is not None
            and query.get("ifGenerationNotMatch") == str(current[0])
        ):
            return 304, b"", {}
        if method != "POST" and current is None:
            return self.failure(404)
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != (current or (0,))[0]:
            return self.failure(412)
        if method == "POST":
            payload = {
                "name": key,
                "generation": str(self.put(bucket, key, body)),
                "size": str(len(body)),
            }
            return 200, json.dumps(payload | {"updated": "2026-01-01T00:00:00Z"}).encode(), {}
        if method == "DELETE":
            del self.objects[bucket][key]
            return 204, b"", {}
        return self.part(current[1], headers, {"x-goog-generation": current[0]})

    def list(self, objects, query):
        first = max(
            query.get("startOffset", ""), bytes.fromhex(query.get("pageToken", "")).decode()
        )
        names = sorted(
            name for name in objects if name.startswith(query.get("prefix", "")) and name >= first
        )
        names = [name for name in names if "endOffset" not in query or name < query["endOffset"]]
        items = [
            {"name": name, "generation": str(objects[name][0]), "size": str(len(objects[name][1]))}
            for name in names[: self.page]
        ]
        payload = {"kind": "storage#objects", "items": items}
        if len(names) > self.page:
            # The driver does not quote it.
            payload["nextPageToken"] = names[self.page].encode().hex()
        return 200, json.dumps(payload).encode(), {}
