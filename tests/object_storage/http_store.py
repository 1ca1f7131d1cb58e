"""Base of the fake stores: a server on loopback that records requests, pages lists, and injects
failures."""

import http.server
import json
import re
import threading
import urllib.parse


class HttpStore:
    """An HTTP server of buckets in memory.

    Attributes:
        objects: Bucket → key → (generation, bytes).
        page: The number of keys per page of a list.
        seen: All requests so far, as "GET /path query".
        fail: Faults (method, path, status, times), in which method and path are regular
            expressions. The first one that matches determines the response, this many times. Status
            0: the request is executed and its response lost; -1: there is no response; None: the
            request is served, even if a later fault matches.
        watch: Called with the number of each request before it is served.
    """

    def __init__(self, buckets=("bkt",), page=1000):
        self.objects = {bucket: {} for bucket in buckets}
        self.page, self.fail, self.seen, self.watch = page, [], [], None
        self.generation = 1_700_000_000_000_000
        self.lock, self.ended = threading.Lock(), threading.Event()
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args):
                pass

            def handle_one_request(self):
                try:
                    super().handle_one_request()
                except (ConnectionError, TimeoutError, ValueError):  # the client was killed
                    self.close_connection = True

            def serve(self):
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = urllib.parse.unquote(url.path)
                with store.lock:
                    store.seen.append(f"{self.command} {path} {url.query}")
                    number = len(store.seen)
                if store.watch is not None:
                    store.watch(number)
                status = store.fault(self.command, path)
                if status == -1:
                    store.ended.wait(60)
                    self.close_connection = True
                    return
                if status:
                    response = store.failure(status)
                else:
                    with store.lock:
                        response = store.respond(self.command, path, query, self.headers, body)
                    if status == 0:
                        self.close_connection = True
                        return
                self.send(*response)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815

            def send(self, status, body=b"", headers=None):
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, str(value))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self):
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def fault(self, method, path):
        with self.lock:
            for i, (m, p, status, times) in enumerate(self.fail):
                if times and re.search(m, method) and re.search(p, path):
                    self.fail[i] = (m, p, status, times - 1)
                    return status
        return None

    def failure(self, status):
        return status, json.dumps({"error": {"code": status, "message": "injected"}}).encode(), {}

    def put(self, bucket, key, body):
        self.generation += 1
        self.objects[bucket][key] = self.generation, body
        return self.generation

    def keys(self, start="", bucket="bkt"):
        return sorted(key for key in list(self.objects[bucket]) if key.startswith(start))

    def data(self, key, bucket="bkt"):
        return self.objects[bucket][key][1]

    def part(self, data, headers, head):
        """Return an object, or the requested range of it."""
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))
        if not match:
            return 200, data, head
        if match[1]:
            first, last = int(match[1]), min(int(match[2] or len(data) - 1), len(data) - 1)
        else:
            first, last = max(0, len(data) - int(match[2])), len(data) - 1
        if first >= len(data):
            return 416, b"", {}
        return (
            206,
            data[first : last + 1],
            head | {"Content-Range": f"bytes {first}-{last}/{len(data)}"},
        )
