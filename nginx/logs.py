"""Keep nginx's logs small: they lie in memory, and any client makes them longer.

A server that ends with us has its logs begun anew when they are long. One that outlives us is held
by the kernel: a native nginx can write no file beyond a limit, and Docker rotates.
"""

import os
import threading
from pathlib import Path

LOG_BYTES = 16 << 20  # an epoch of ImageNet is 16 MB
FILE_BYTES = 4 * LOG_BYTES  # beyond this the kernel lets a native nginx write no more
LOOK_SECONDS = 1.0


class Logs:
    """The logs of a server, cut for as long as it runs."""

    def __init__(self, *paths: Path) -> None:
        """Cut nothing yet."""
        self.paths = paths
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def keep_short(self) -> None:
        """Begin to cut, until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Cut no more. Twice does no harm."""
        self._enough.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._enough.wait(LOOK_SECONDS):
            for path in self.paths:
                if path.exists() and path.stat().st_size > LOG_BYTES:
                    os.truncate(path, 0)  # nginx appends, so it goes on at the beginning
