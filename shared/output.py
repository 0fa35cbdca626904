"""Text to a file descriptor, written by a thread of its own: a full disk or a reader that reads nothing stops nobody.

What cannot be written, or does not fit into the queue, is dropped; once writing works again a line says how much was lost.
"""

import atexit
import os
import threading
import time
from queue import SimpleQueue

STDOUT, STDERR = 1, 2
MAX_WAITING = 10_000  # pieces of text
CLOSE_S = 1.0  # that the last pieces may take


class Output:
    """A file as logging and print want it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: SimpleQueue[str] = SimpleQueue()
        self._num_lost = 0
        self._writing = False
        threading.Thread(target=self._run, name="output", daemon=True).start()
        atexit.register(self.close)

    def write(self, text: str) -> int:
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(text)
        else:
            self._num_lost += 1
        return len(text)

    def flush(self) -> None:
        """Nobody waits for the writer."""

    def close(self) -> None:
        """Give the last pieces a moment to be written."""
        end = time.monotonic() + CLOSE_S
        while (self._waiting.qsize() or self._writing) and time.monotonic() < end:
            time.sleep(0.001)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            text = self._waiting.get()
            self._writing = True
            lost, self._num_lost = self._num_lost, 0
            if lost:
                text = f"{lost} lines of the log were lost: it could not be written\n{text}"
            if not self._put(text.encode("utf-8", "backslashreplace")):
                self._num_lost += lost + 1
            self._writing = False

    def _put(self, raw: bytes) -> bool:
        try:
            while raw:
                raw = raw[os.write(self._descriptor, raw) :]
        except OSError:  # the disk is full, or nobody is at the other end
            return False
        return True
