"""What nginx's access log says: requests, bytes, and from how many machines."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Traffic:
    """Counts of an access log, read as it grows."""

    log: Path
    requests: int = 0
    bytes: int = 0
    clients: set[str] = field(default_factory=set)
    _read: int = 0  # bytes of the log that are counted

    def update(self) -> None:
        """Count the lines that have been added since the last time."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._count(json.loads(line))

    def _count(self, request: dict[str, str | int | float]) -> None:
        self.requests += 1
        self.bytes += int(request["bytes"])
        self.clients.add(str(request["client"]))
