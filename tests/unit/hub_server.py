"""A stand-in for the Hugging Face hub: the part of its HTTP protocol that reads files of models."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """Repositories, each a list of commits of which the last is `main`.

    fetched: paths of files whose content was sent.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, list[tuple[str, Files]]] = {}
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        """Its HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, name: str, changes: Files) -> str:
        """Add a commit to a repository; its id."""
        commits = self.repositories.setdefault(name, [])
        files = {**commits[-1][1], **changes} if commits else dict(changes)
        oid = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits.append((oid, files))
        return oid

    def at(self, name: str, revision: str) -> tuple[str, Files] | None:
        """The commit of a repository that a revision stands for."""
        commits = self.repositories[name]
        if revision == "main":
            return commits[-1] if commits else None
        return next((commit for commit in commits if commit[0] == revision), None)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._resolve(with_content=False)

    def do_GET(self) -> None:
        self._resolve(with_content=True)

    def _resolve(self, with_content: bool) -> None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", unquote(self.path))
        if match is None or match[1] not in self.server.repositories:
            return self._refuse("RepoNotFound")
        found = self.server.at(match[1], match[2])
        if found is None:
            return self._refuse("RevisionNotFound")
        oid, files = found
        if match[3] not in files:
            return self._refuse("EntryNotFound", oid)
        content = files[match[3]]
        if with_content:
            self.server.fetched.append(match[3])
        self._send(200, content, {"X-Repo-Commit": oid, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, with_content)

    def _refuse(self, code: str, oid: str = "") -> None:
        self._send(404, b"", {"X-Error-Code": code, **({"X-Repo-Commit": oid} if oid else {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str], with_content: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers while the context lasts."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
