"""Who may ask the admin port, and from where."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.admin.answers import Refused
from router.token import Token

if TYPE_CHECKING:
    from router.settings import AdminSettings

_PROBES = ("/livez", "/readyz")
"""Asked by who holds no token, such as the kubelet; they tell whether, and not what."""

_SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""

_CHALLENGES = ('Bearer realm="warmroute admin"', 'Basic realm="warmroute admin", charset="UTF-8"')


class Guard:
    """Stands before the admin application. Three things are asked of a request:

    - the token, where there is one: as `Bearer`, or as the password of `Basic`, all that a browser can send
    - without one, a `host` of this machine: a page whose name was made to lead here (DNS rebinding) comes with its own
    - to change something, not to come from another site's page: a browser adds to requests what it was once told

    There is no CORS, so that pages elsewhere can read nothing.
    """

    def __init__(self, settings: AdminSettings) -> None:
        self.prepare(settings)()

    def prepare(self, settings: AdminSettings) -> Callable[[], None]:
        """What puts other settings in force. Raises ValueError."""
        secret = settings.token.get_secret_value()
        token = Token(secret, settings.token_file) if secret or settings.token_file else None

        def commit() -> None:
            self._token, self._settings = token, settings

        return commit

    @property
    def files(self) -> tuple[str, ...]:
        """What was read."""
        return self._token.files if self._token is not None else ()

    def reload(self) -> None:
        """Read the token's file again. Raises ValueError, and the token in force stays."""
        if self._token is not None:
            self._token.reload()

    def before(self, app: ASGIApp) -> ASGIApp:
        """The application behind it."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                try:
                    self.check(scope["method"], scope["path"], Headers(scope=scope))
                except Refused as refused:
                    answer = JSONResponse({"error": {"message": str(refused), "code": refused.code}}, refused.status)
                    if refused.status == 401:
                        for challenge in _CHALLENGES:
                            answer.headers.append("www-authenticate", challenge)
                    await answer(scope, receive, send)
                    return
            await app(scope, receive, send)

        return guarded

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raises Refused."""
        settings = self._settings
        if not settings.guarded and not settings.open and not _is_here(headers, settings.host):
            raise Refused(
                421,
                "foreign_host",
                f"This port answers to its own names only, not to {headers.get('host', '')!r}. Ask for localhost, or "
                "set a token.",
            )
        if method not in _SAFE and _is_foreign(headers):
            raise Refused(403, "foreign_origin", "Pages of other sites may change nothing here.")
        if self._token is None or path in _PROBES or (settings.open_metrics and path == "/metrics"):
            return
        given = _credential(headers.get("authorization", ""))
        if given is None or not self._token.matches(given):
            how = "send it as `authorization: Bearer TOKEN`; commands take --token-file"
            wrong = "The admin token is required" if given is None else "This is not the admin token"
            raise Refused(401, "token", f"{wrong}: {how}.")


def _is_here(headers: Mapping[str, str], own: str) -> bool:
    """Whether the `host` is a name that leads to this machine whatever a name server says."""
    host = headers.get("host")
    if host is None:
        return True  # no browser leaves it out
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
    if name in (own.lower(), "localhost") or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page from elsewhere asks. Other clients say nothing."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _credential(value: str) -> bytes | None:
    scheme, _, rest = value.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return None
    return None
