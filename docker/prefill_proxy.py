"""Before two servers with a KV connector: one computes prompts, the other has their pages from it and generates.

    python docker/prefill_proxy.py --prefill http://a:8000 --decode http://b:8000

Prompts that the prefill server does not answer for are computed by the other one: only that one's end loses requests.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask

GENERATING = ("v1/completions", "v1/chat/completions")
_PARAMS = "kv_transfer_params"
#: Of one connection: httpx sets them anew.
_NOT_PASSED_ON = ("connection", "content-length", "host", "transfer-encoding")


def main() -> None:
    """Listen until stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, help="URL of the server that computes prompts (kv_producer)")
    parser.add_argument("--decode", required=True, help="URL of the server that generates (kv_consumer)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds; then the decode server computes the prompt"
    )
    given = parser.parse_args()
    app = make_app(given.prefill, given.decode, given.timeout)
    uvicorn.run(app, host=given.host, port=given.port, server_header=False, date_header=False)


def make_app(prefill: str, decode: str, seconds: float) -> FastAPI:
    """The proxy of two servers with these URLs; what the first does not answer in time is left to the second."""
    app = FastAPI(openapi_url=None)
    # A connection that was kept might end just when it is used again.
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_keepalive_connections=0))

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        body, headers = await request.body(), _kept(request.headers)
        if request.method == "POST" and path in GENERATING:
            # A body that is not one of JSON, and a prompt that is refused, are the decode server's to answer.
            with suppress(httpx.HTTPError, ValueError, TypeError, TimeoutError):
                async with asyncio.timeout(seconds):
                    computed = await client.post(f"{prefill}/{path}", json=_prompt_only(body), headers=headers)
                    # Where pages are, which NIXL's servers say to each other through their clients.
                    body = json.dumps({**json.loads(body), _PARAMS: computed.json().get(_PARAMS)}).encode()
        to_decode = client.build_request(
            request.method, f"{decode}/{path}", params=request.query_params, content=body, headers=headers
        )
        try:
            answer = await client.send(to_decode, stream=True)
        except httpx.TransportError as error:
            message = f"The decode server does not answer: {error or type(error).__name__}."
            return JSONResponse({"error": {"message": message, "type": "BadGateway", "code": 502}}, 502)
        ended = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, _kept(answer.headers), background=ended)

    return app


def _prompt_only(body: bytes) -> dict[str, object]:
    """The same request for one token."""
    asked = {**json.loads(body), "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "n": 1}
    asked.pop("stream_options", None)
    return {**asked, _PARAMS: {"do_remote_decode": True}}


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED_ON}


if __name__ == "__main__":
    main()
