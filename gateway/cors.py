"""Which web pages may call this server: answers to their browsers' questions, for the origins of the configuration."""

from aiohttp import web

from shared.config import BadConfig

ANY = "*"
MAX_AGE_S = 600
METHODS = "GET, POST, OPTIONS"
EXPOSED = "X-Request-Id, X-Client-Request-Id, X-Stream-Id, Retry-After"


class Origins:
    def __init__(self, setting: str) -> None:
        """Origins separated by commas; * is all; empty is none. BadConfig names one that is none."""
        self._allowed = frozenset(filter(None, (each.strip() for each in setting.split(","))))
        for each in self._allowed - {ANY}:
            scheme, found, host = each.partition("://")
            if scheme not in ("http", "https") or not found or not host or "/" in host:
                raise BadConfig(f"cors_origins = {setting!r}: {each!r} is no origin such as https://example.org")

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """For every answer to a page that may read it."""
        origin = request.headers.get("Origin", "")
        if not origin or not self._allowed & {origin, ANY}:
            return {}
        allowed = ANY if ANY in self._allowed else origin
        return {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": EXPOSED, "Vary": "Origin"}

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks before it sends, which it does without a key; None: this is no such question."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers or not self.headers(request):
            return None
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if wanted and wanted.isascii() and wanted.isprintable():
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)
