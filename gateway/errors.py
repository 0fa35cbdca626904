"""Every refusal of the API: one exception, one body shape {"error": {message, type, param, code}}."""

from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer other than 2xx. param: the request field at fault, or empty."""

    def __init__(self, status: int, text: str, *, code: str = "", param: str = "", retry_after_s: float = 0) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.text, "type": kind, "param": self.param or None, "code": self.code or None}}


class BadRequest(ApiError):
    """A request that is wrong in itself; sending it again unchanged cannot help."""

    def __init__(self, text: str, param: str = "", code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(status, text, code=code, param=param)


class Unavailable(ApiError):
    """Nobody can compute it now; the client may try again."""

    def __init__(self, text: str, retry_after_s: float = 2, code: str = "service_unavailable") -> None:
        super().__init__(503, text, code=code, retry_after_s=retry_after_s)
