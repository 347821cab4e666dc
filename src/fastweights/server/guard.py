"""At the door: who may ask at all, how much may be sent, and for how long.

- The Host must be an address, this machine's name or one that was allowed: a foreign name that resolves to this machine
  (DNS rebinding) is turned away.
- A page of another origin gets nothing, unless its origin was allowed.
- With a token, everything but the page itself wants `Authorization: Bearer`.
- Bodies are counted and timed while they come in.
"""

import asyncio
import hmac
import ipaddress
import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastweights.server.errors import Refusal
from fastweights.server.limits import Limits
from fastweights.utils.errors import UserError

API = "/v1"
BLANKS = " \t\r\n"
"""What does not count at either end of a token. What else Python takes for blank are parts of letters in a header."""
ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
}


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    token: str = ""
    """What `Authorization: Bearer` has to say, without blanks around it; empty for no such thing."""
    origins: tuple[str, ...] = ()
    """Origins of other pages that may ask: https://example.org."""
    hosts: tuple[str, ...] = ()
    """Names under which this service is known, besides those of this machine."""

    def __post_init__(self) -> None:
        bare = self.token.strip(BLANKS)
        if self.token and not bare:  # who wants a token is not left without one
            raise UserError("a token of nothing but blanks keeps nobody out; choose another --token, or none.")
        object.__setattr__(self, "token", bare)


class Guard:
    """Stands before the application."""

    def __init__(self, app: ASGIApp, limits: Limits, access: Access) -> None:
        self.app, self.limits, self.access = app, limits, access
        mine = socket.gethostname().lower()
        self.hosts = {"localhost", mine, f"{mine}.local", *(name.lower() for name in access.hosts)}
        self.busy = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        allowed = headers.get("origin", "") if headers.get("origin") in self.access.origins else ""

        refused: list[Refusal] = []  # a body that is too large or too slow
        started = False

        async def answering(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._mark(MutableHeaders(scope=message), scope["path"], allowed)
            await send(message)

        async def passing(message: Message) -> None:
            if started or not refused:  # otherwise it is what somebody made of the refusal
                await answering(message)

        if self.busy >= self.limits.requests:
            await _refuse(Refusal(503, "Too many are asking at once; try again in a moment."), answering)
            return
        self.busy += 1
        try:
            self._admit(scope, headers, bool(allowed))
            if allowed and scope["method"] == "OPTIONS":
                await _preflight(answering)
                return
            await self.app(scope, self._measured(scope, receive, refused), passing)
            if refused and not started:
                raise refused[0]
        except Refusal as refusal:
            await _refuse(refusal, answering)
        finally:
            self.busy -= 1

    def _admit(self, scope: Scope, headers: Headers, allowed: bool) -> None:
        host = headers.get("host", "")
        if not self._is_ours(host):
            raise Refusal(421, "This service does not go by that name; start it with --allow-host to change that.")
        origin = headers.get("origin")
        own = (f"http://{host}".lower(), f"https://{host}".lower())
        foreign = origin is not None and origin.lower() not in own
        if (foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site")) and not allowed:
            navigating = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
            if foreign or not navigating:
                raise Refusal(403, "Pages of other origins may not ask; start the service with --allow-origin.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most(scope):
            raise Refusal(413, f"Send at most {self._most(scope):,} bytes.")
        if self.access.token and scope["path"].startswith((API, "/openapi")) and scope["method"] != "OPTIONS":
            kind, _, said = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(said.strip(BLANKS).encode("latin-1"), self.access.token.encode())
            if kind.lower() != "bearer" or not right:
                raise Refusal(401, "This service wants its token: Authorization: Bearer ...")

    def _is_ours(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        else:
            name = name.partition(":")[0]
        if name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _most(self, scope: Scope) -> int:
        return self.limits.file if scope["path"].rstrip("/") == f"{API}/files" else self.limits.body

    def _measured(self, scope: Scope, receive: Receive, refused: list[Refusal]) -> Receive:
        """What comes in, counted and timed until it is complete. Whoever reads it may swallow what it is refused with.

        That is therefore written down, too.
        """
        got, complete, most = 0, False, self._most(scope)
        deadline = asyncio.get_running_loop().time() + self.limits.body_seconds

        def refuse(status: int, sentence: str) -> Refusal:
            refused.append(Refusal(status, sentence))
            return refused[-1]

        async def measured() -> Message:
            nonlocal got, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise refuse(408, f"The request took more than {self.limits.body_seconds:.0f} s to arrive.") from None
            got += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if got > most:
                raise refuse(413, f"Send at most {most:,} bytes.")
            return message

        return measured

    def _mark(self, headers: MutableHeaders, path: str, allowed: str) -> None:
        for name, value in ALWAYS.items():
            headers.setdefault(name, value)
        headers.setdefault("Cache-Control", "no-store" if path.startswith(API) else "no-cache")
        if allowed:
            headers["Access-Control-Allow-Origin"] = allowed
            headers["Vary"] = "Origin"
            headers["Cross-Origin-Resource-Policy"] = "cross-origin"


async def _preflight(send: Send) -> None:
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE",
        "Access-Control-Allow-Headers": "Authorization, Content-Type",
        "Access-Control-Max-Age": "600",
    }
    await _send(send, 204, b"", allowed.items())


async def _refuse(refusal: Refusal, send: Send) -> None:
    extra = {401: [("WWW-Authenticate", "Bearer")], 503: [("Retry-After", "1")]}.get(refusal.status, [])
    await _send(send, refusal.status, error_body(refusal), [("Content-Type", "application/json"), *extra])


async def _send(send: Send, status: int, body: bytes, headers: Iterable[tuple[str, str]]) -> None:
    pairs = [*headers, ("Content-Length", str(len(body))), ("Connection", "close")]
    raw = [(name.lower().encode(), value.encode()) for name, value in pairs]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def error_body(error: Exception) -> bytes:
    """The JSON of every error: one sentence."""
    return json.dumps({"error": str(error)}).encode()
