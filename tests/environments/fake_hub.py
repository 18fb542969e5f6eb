"""A Hugging Face hub on loopback, for the real client."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "a" * 40


Refusal = tuple[int, str]
"""HTTP status and the header x-error-code."""


@contextmanager
def fake_hub(
    repo: str,
    files: Mapping[str, bytes],
    refused: Mapping[str, Refusal] | None = None,
    cut: str = "",
) -> Iterator[str]:
    """Start a hub with one dataset of these files; yield its address, for HF_ENDPOINT.

    Args:
        refused: other datasets, with the answer to each request for one.
        cut: another dataset with these files, whose connections end in the middle of a file.
    """

    class Handler(_Handler):
        name, held, refusals, cut_name = repo, files, refused or {}, cut

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    name: str
    commit = COMMIT
    ends_early = False
    held: Mapping[str, bytes]
    refusals: Mapping[str, Refusal]
    cut_name: str

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        for name, (status, code) in self.refusals.items():
            if f"/datasets/{name}/" in f"{path}/":
                self._send(status, b"{}", {"x-error-code": code} if code else {})
                return
        self.ends_early = bool(self.cut_name) and self.cut_name in path
        name = self.cut_name if self.ends_early else self.name
        about, file = f"/api/datasets/{name}", f"/datasets/{name}/resolve/"
        # The commit that is named, else the only one.
        self.commit = next((p for p in path.split("/") if len(p) == len(COMMIT)), COMMIT)
        if path == about or path.startswith(f"{about}/revision/"):
            names = [{"rfilename": name} for name in self.held]
            facts = {"id": name, "sha": self.commit, "private": False, "gated": False, "tags": []}
            self._json({**facts, "downloads": 0, "likes": 0, "siblings": names})
        elif path.startswith(f"{about}/tree/"):
            folder = path.removeprefix(f"{about}/tree/").partition("/")[2]
            whole = "recursive=true" in urlparse(self.path).query.lower()
            self._json(self._files() if whole else self._folder(folder))
        elif path.startswith(file) and (name := path[len(file) :].partition("/")[2]) in self.held:
            self._file(self.held[name])
        else:
            self._send(404, b"{}", {"x-error-code": "EntryNotFound"})

    do_HEAD = do_GET

    def _files(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
            for name, data in self.held.items()
        ]

    def _folder(self, folder: str) -> list[dict[str, Any]]:
        """Return the entries of a folder; "" is the root."""
        top = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for name, data in self.held.items():
            first, _, below = name.removeprefix(top).partition("/")
            if name.startswith(top):
                size = 0 if below else len(data)
                kind = "directory" if below else "file"
                found[first] = {"type": kind, "path": top + first, "size": size, "oid": "0" * 40}
        return list(found.values())

    def _file(self, data: bytes) -> None:
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        headers = {"etag": etag, "x-repo-commit": self.commit, "accept-ranges": "bytes"}
        ranges = self.headers.get("range")
        if ranges is None:
            self._send(200, data, headers)
            return
        first, _, last = ranges.removeprefix("bytes=").partition("-")
        end = min(int(last or len(data)), len(data) - 1)
        headers["content-range"] = f"bytes {first}-{end}/{len(data)}"
        self._send(206, data[int(first) : end + 1], headers)

    def _json(self, form: Any) -> None:
        self._send(200, json.dumps(form).encode(), {"content-type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut = self.ends_early and self.path.count("/resolve/")
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = self.close_connection or bool(cut)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""
