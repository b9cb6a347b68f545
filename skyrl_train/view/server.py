"""Who may ask, and how: answers and the page's files over HTTP, on 127.0.0.1, for whoever has the token.

A page of another site can send requests here, and by rebinding its name's address even read the answers. So the Host must
be this machine's, the token comes with the first request alone and then as a cookie that other sites' requests do not
carry, and nothing is answered that another page may embed.
"""

from __future__ import annotations

import hmac
import mimetypes
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from skyrl_train.endpoints import listening
from skyrl_train.errors import ModelError
from skyrl_train.view.answers import Answers, to_json
from skyrl_train.view.export import write_report
from skyrl_train.view.filters import NotThereError

if TYPE_CHECKING:
    from starlette.requests import Request

STATIC = Path(__file__).parent / "static"
_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_TOKEN = "Open the address that skyrl-view printed, with its token: it is a new one each time."


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(32)


def make_app(answers: Answers, *, token: str, static: Path = STATIC) -> Starlette:
    """Return the application, which asks for `token`."""

    def as_json(status: int, text: str) -> Response:
        return Response(text, status, media_type="application/json")

    def refused(status: int, error: object) -> Response:
        return as_json(status, to_json({"error": str(error), "problems": []}))

    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Let through who is on this machine and has the token."""
        cookie = f"skyrl_view_{request.url.port or 80}"
        if _host_of(request.headers.get("host", "")) not in _HOSTS:
            response: Response = refused(421, "open this by 127.0.0.1 or localhost")
        elif request.method != "GET":
            response = refused(405, "nothing can be changed here")
        elif request.url.path == "/" and _is_equal(request.query_params.get("token", ""), token):
            response = RedirectResponse("/", 303)
            response.set_cookie(cookie, token, httponly=True, samesite="strict")
        elif _is_equal(request.cookies.get(cookie, ""), token):
            response = await call_next(request)
        elif request.url.path == "/":
            response = PlainTextResponse(_NO_TOKEN, 403)
        else:
            response = refused(403, _NO_TOKEN)
        response.headers.update(_HEADERS)
        return response

    async def answer(request: Request) -> Response:
        def made() -> tuple[int, str]:
            status, found = answers.answer(f"api/{request.path_params['name']}", request.query_params.multi_items())
            return status, to_json(found)

        return as_json(*await run_in_threadpool(made))

    async def image(request: Request) -> Response:
        def made() -> Response:
            try:
                found = answers.picture(request.query_params.get("run", ""), request.query_params.get("sum", ""))
            except NotThereError as error:
                return refused(404, error)
            except (ValueError, ModelError) as error:
                return refused(400, error)
            return Response(found.data, media_type=found.media_type)

        return await run_in_threadpool(made)

    async def export(request: Request) -> Response:
        def made() -> Response:
            try:
                report = write_report(answers, request.query_params.multi_items(), static)
            except ValueError as error:
                return refused(400, error)
            headers = {"Content-Disposition": 'attachment; filename="report.html"'}
            return Response(report, headers=headers, media_type="text/html")

        return await run_in_threadpool(made)

    async def file(request: Request) -> Response:
        path = static_file(static, request.path_params.get("name", "index.html"))
        if path is None:
            return refused(404, "there is no such file")
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return Response(path.read_bytes(), media_type="text/javascript" if path.suffix == ".js" else kind)

    routes = [
        Route("/", file),
        Route("/api/export", export),
        Route("/api/image", image),
        Route("/api/{name}", answer),
        Route("/static/{name:path}", file),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])


def static_file(static: Path, name: str) -> Path | None:
    """Return one of the page's files, None for a name that leads to no file of its folder."""
    try:
        path = (static / name).resolve()
        return path if path.is_relative_to(static.resolve()) and path.is_file() else None
    except (OSError, ValueError):  # too long a name, or one with a null byte
        return None


def serve(app: Starlette, *, port: int, announce: Callable[[int], None]) -> None:
    """Answer until the process is told to end. `announce` is told the port, a free one where `port` is 0."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        log_level="warning",
        access_log=False,  # addresses have the token
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    listener = config.bind_socket()
    announce(listening(listener))  # whoever is told the port may ask at once, and waits until the server has started
    uvicorn.Server(config).run(sockets=[listener])


def _host_of(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
