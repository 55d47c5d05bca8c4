"""The dashboard's static files. They hold no data: the page queries the routes with the visitor's API key."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response

_FOLDER = Path(__file__).parent / "dashboard"
#: Path under the router, file, media type.
_FILES = (
    ("/", "index.html", "text/html; charset=utf-8"),
    ("/dashboard.css", "dashboard.css", "text/css; charset=utf-8"),
    ("/dashboard.js", "dashboard.js", "text/javascript; charset=utf-8"),
)
_HEADERS = {
    # Injected content could load, run and send nothing.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(router: APIRouter) -> None:
    """Serve the files. They are read once, so no request path ever reaches the file system."""
    for path, name, media_type in _FILES:
        router.add_api_route(path, _serve((_FOLDER / name).read_bytes(), media_type), include_in_schema=False)


def _serve(content: bytes, media_type: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return file
