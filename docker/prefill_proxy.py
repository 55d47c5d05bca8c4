"""Before two servers with a KV connector: one computes prompts, the other has their pages from it and generates.

    python docker/prefill_proxy.py --prefill http://a:8000 --decode http://b:8000

Prompts that the prefill server does not answer for are computed by the other one: only that one's end loses requests.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask

#: Prompts are computed by the one server, answers by the other.
GENERATING = ("/v1/completions", "/v1/chat/completions")
#: The decode server's answers, as they are.
OF_DECODE = ("/health", "/metrics", "/v1/models", "/version")
#: Likewise, of what is posted.
OF_TOKENS = ("/tokenize", "/detokenize")
#: Where pages are, which NIXL's servers say to each other through the proxy: never what a client says.
_PARAMS = "kv_transfer_params"
#: Values of this field are vLLM's, whatever their names.
_MORE = "vllm_xargs"
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

    async def generate(request: Request) -> Response:
        path, headers = request.url.path, _kept(request.headers)
        try:
            asked = _of_client(await request.body())
        except (ValueError, RecursionError) as error:
            return _error(400, f"The body is no JSON object ({error}): send one.")
        # A prompt that is refused is the decode server's to answer.
        with suppress(httpx.HTTPError, ValueError, TypeError, AttributeError, TimeoutError):
            async with asyncio.timeout(seconds):
                computed = await client.post(f"{prefill}{path}", json=_prompt_only(asked), headers=headers)
                asked[_PARAMS] = computed.json().get(_PARAMS)
        return await pass_on(request, json.dumps(asked).encode())

    async def pass_on(request: Request, body: bytes = b"") -> Response:
        url, query, headers = f"{decode}{request.url.path}", request.query_params, _kept(request.headers)
        to_decode = client.build_request(request.method, url, params=query, content=body, headers=headers)
        try:
            answer = await client.send(to_decode, stream=True)
        except httpx.TransportError as error:
            return _error(502, f"The decode server does not answer: {error or type(error).__name__}.")
        ended = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, _kept(answer.headers), background=ended)

    async def look_up(request: Request) -> Response:
        return await pass_on(request, await request.body())

    async def refuse(request: Request, error: Exception) -> Response:
        known = ", ".join((*GENERATING, *OF_DECODE, *OF_TOKENS))
        return _error(404, f"The proxy knows only {known}: ask the decode server itself for anything else.")

    for path in GENERATING:
        app.add_api_route(path, generate, methods=["POST"])
    for path in OF_DECODE:
        app.add_api_route(path, look_up, methods=["GET"])
    for path in OF_TOKENS:
        app.add_api_route(path, look_up, methods=["POST"])
    app.add_exception_handler(404, refuse)
    return app


def _of_client(body: bytes) -> dict[str, Any]:
    """What a client asks for, without what it says of pages.

    Raises:
        ValueError: no JSON object.
    """
    asked = json.loads(body)
    if not isinstance(asked, dict):
        raise ValueError(f"it is a {type(asked).__name__}")
    for place in (asked, asked.get(_MORE)):
        if isinstance(place, dict):
            place.pop(_PARAMS, None)
    return asked


def _prompt_only(asked: dict[str, Any]) -> dict[str, Any]:
    """The same request for one token."""
    one = {**asked, "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "n": 1}
    one.pop("stream_options", None)
    return {**one, _PARAMS: {"do_remote_decode": True}}


def _error(code: int, message: str) -> JSONResponse:
    """In the form of OpenAI's API."""
    return JSONResponse({"error": {"message": message, "type": HTTPStatus(code).phrase, "code": code}}, code)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED_ON}


if __name__ == "__main__":
    main()
