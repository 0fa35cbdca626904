"""What only operators may do, over the admin listener: POST /drain/WORKER."""

from aiohttp import web

from gateway.errors import ApiError
from gateway.handlers import SESSION, json_response


async def drain(request: web.Request) -> web.Response:
    """A worker's sequences move to others at once (or wait for one), then its process ends; 404 for one that is not there."""
    if "Origin" in request.headers:  # a page in a browser of this machine is no operator
        raise ApiError(403, "This is not for pages", code="forbidden")
    worker = request.match_info["worker"]
    answer = await request.app[SESSION].service.drain_worker(worker)
    if answer.error:
        raise ApiError(404, answer.error, code="unknown_worker", param="worker")
    return json_response({"worker": worker, "moved_sequences": answer.num_moved})


OPERATOR_ROUTES = (web.post("/drain/{worker}", drain),)
