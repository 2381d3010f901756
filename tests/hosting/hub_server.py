"""A small hub on a real socket: what huggingface_hub asks for when it downloads a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Models by name, each a directory. What was asked is in `asked`; faults are set from outside.

    `broken_after` cuts each file short once at so many bytes; then nothing of files is given until
    `broken_after` is None again. `gate` is waited for before the second half of a U-Net is given.
    """

    def __init__(self, models: dict[str, Path]) -> None:
        self.models = models
        self.gated: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.ranges: dict[str, str] = {}
        self.broken_after: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.reached_gate = threading.Event()
        self.endpoint = ""

    def files(self, name: str) -> dict[str, bytes]:
        """What a model has."""
        root = self.models[name]
        return {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    @property
    def given(self) -> set[str]:
        """The files that were asked for by their contents."""
        return {
            path.partition(f"/resolve/{COMMIT}/")[2] or path.partition("/resolve/main/")[2]
            for method, path in self.asked
            if method == "GET" and "/resolve/" in path
        }


@contextmanager
def running_hub(models: dict[str, Path]) -> Iterator[Hub]:
    """A hub on a port of its own."""
    hub = Hub(models)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.asked.append((self.command, path))
        parts = path.strip("/").split("/")
        if len(parts) < 5:
            self._send(404, {})
        elif parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4], parts[5])
        else:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _is_refused(self, name: str, revision: str) -> bool:
        if name not in self.served.models:
            self._send(404, {"X-Error-Code": "RepoNotFound"})
        elif name in self.served.gated:
            self._send(403, {"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", COMMIT):
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _api(self, name: str, what: str, revision: str) -> None:
        if self._is_refused(name, revision):
            return
        files = self.served.files(name)
        told: Any = [
            {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
            for path, data in files.items()
        ]
        if what == "revision":
            siblings = [
                {"rfilename": path, "size": len(data), "blobId": _etag(data)}
                for path, data in files.items()
            ]
            told = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

    def _file(self, name: str, revision: str, path: str) -> None:
        if self._is_refused(name, revision):
            return
        hub = self.served
        data = hub.files(name).get(path)
        if data is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"})
            return
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted:
            hub.ranges[path] = wanted
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        is_weight = path.endswith(".safetensors") and self.command == "GET"
        if is_weight and hub.broken_after is not None:
            if hub.broken_after < 0:
                self._send(403, {})
                return
            cut, hub.broken_after = hub.broken_after, -1
            self._send(200, headers, data[:cut], length=len(data))
            self.close_connection = True
            return
        if is_weight and path.startswith("unet") and not hub.gate.is_set():
            middle = (start + len(data)) // 2
            self._send(
                206 if wanted else 200, headers, data[start:middle], length=len(data) - start
            )
            hub.reached_gate.set()
            hub.gate.wait()
            self.wfile.write(data[middle:])
            return
        self._send(206 if wanted else 200, headers, data[start:])

    def _send(
        self, status: int, headers: dict[str, str], data: bytes = b"", length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
