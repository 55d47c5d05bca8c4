"""HTTP servers in the test process."""

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Server(ThreadingHTTPServer):
    """On a free port; it answers while its context lasts."""

    daemon_threads = True

    def __init__(self, handler: type["Handler"]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def send(self, status: int, content: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""
