"""A stand-in for the Hugging Face hub: the part of its HTTP protocol that reads and writes files of models."""

import base64
import hashlib
import json
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
    objects: what was uploaded for itself, by its SHA-256, before a commit names it (Git LFS).
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, list[tuple[str, Files]]] = {}
        self.fetched: list[str] = []
        self.objects: dict[str, bytes] = {}

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

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            self.server.repositories.setdefault(name, [])
            return self._answer({"url": f"{self.server.url}/{name}", "id": name})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            wanted = [self._wanted(each) for each in json.loads(body)["objects"]]
            return self._answer({"transfer": "basic", "objects": wanted})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", self.path)
        if match is None or match[1] not in self.server.repositories:
            return self._refuse("RepoNotFound")
        if match[2] == "preupload":
            files = [{"path": file["path"], "uploadMode": _mode(file), "shouldIgnore": False} for file in _files(body)]
            return self._answer({"files": files})
        lines = [json.loads(line) for line in body.splitlines()]
        added = {line["value"]["path"]: self._content(line) for line in lines if line["key"] != "header"}
        oid = self.server.commit(match[1], added)
        return self._answer({"commitOid": oid, "commitUrl": f"{self.server.url}/{match[1]}/commit/{oid}"})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        digest = hashlib.sha256(content).hexdigest()
        if self.path != f"/objects/{digest}":
            return self._send(400, b"", {})
        self.server.objects[digest] = content
        return self._send(200, b"", {})

    def _wanted(self, given: dict[str, Any]) -> dict[str, Any]:
        """Where an object is to be uploaded to."""
        upload = {"href": f"{self.server.url}/objects/{given['oid']}"}
        return {"oid": given["oid"], "size": given["size"], "actions": {"upload": upload}}

    def _content(self, line: dict[str, Any]) -> bytes:
        """Of a file in a commit: in it, or uploaded before."""
        value = line["value"]
        return self.server.objects[value["oid"]] if line["key"] == "lfsFile" else base64.b64decode(value["content"])

    def _answer(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

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


def _mode(file: dict[str, Any]) -> str:
    """As the hub's own attributes have it: tensors are uploaded for themselves, whatever their size."""
    return "lfs" if file["path"].endswith(".safetensors") else "regular"


def _files(body: bytes) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = json.loads(body)["files"]
    return files


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
