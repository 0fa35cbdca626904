"""The gateway's end of operators' wishes: which workers the scheduler was asked to drain, and its answers."""

import asyncio

from gateway.errors import Unavailable
from shared.messages import DrainAnswer, DrainWorker


class Drains:
    """Questions under way."""

    def __init__(self) -> None:
        self._asked: dict[int, asyncio.Future[DrainAnswer]] = {}
        self._last_ask = 0

    def ask(self, worker: str) -> "tuple[DrainWorker, asyncio.Future[DrainAnswer]]":
        self._last_ask += 1
        number, answer = self._last_ask, asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        answer.add_done_callback(lambda _: self._asked.pop(number, None))
        return DrainWorker(number, worker, "an operator asked for it"), answer

    def on_answer(self, answer: DrainAnswer) -> None:
        asked = self._asked.get(answer.ask)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    def on_lost(self) -> None:
        for asked in list(self._asked.values()):
            if not asked.done():
                asked.set_exception(Unavailable("The scheduler went away", 1, "scheduler_unavailable"))
