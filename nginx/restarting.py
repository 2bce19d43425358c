"""A shard server that is there for as long as the run: one that ends is started again.

Schedulers signal every process of a job, so that nginx ends while ranks still need a batch to come
to where they can save.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from rackrun.errors import Problem

if TYPE_CHECKING:
    from nginx.serve import Server
    from nginx.site import Site

LOOK_SECONDS = 0.1


class RestartingServer:
    """nginx over a folder, as a context that gives the first server; raises a Problem."""

    def __init__(self, site: Site) -> None:
        """Run nothing yet."""
        self.site = site
        self.started: queue.Queue[Server | Problem] = queue.Queue()
        self.enough = threading.Event()
        # The kernel ends nginx with the thread that started it: so that is the one that tends it.
        self.thread = threading.Thread(target=self._tend, daemon=True)

    def __enter__(self) -> Server:
        self.thread.start()
        first = self.started.get()
        if isinstance(first, Exception):
            raise first
        return first

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.enough.set()
        self.thread.join()

    def _tend(self) -> None:
        from nginx.serve import start

        try:
            server = start(self.site)
        except Problem as error:
            self.started.put(error)
            return
        self.started.put(server)
        while not self.enough.wait(LOOK_SECONDS):
            if not server.alive:
                server.stop()
                with contextlib.suppress(Problem):  # the ranks report that no server answers
                    server = start(server.site)
        server.stop()
