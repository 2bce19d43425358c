"""The result of a run: returned by `launch`, shown at the end, written to result.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

CUT_OFF = "no host could be reached any more: this machine's own network was down, or every host"

HOSTS_BACK = "lost hosts are fit again"


@dataclass(frozen=True)
class AttemptResult:
    """How one attempt of a run ended."""

    verdict: str
    """done, failed or interrupted."""
    exit_code: int
    cause: str
    host: str | None
    rank: int | None
    log: Path | None
    seconds: float


@dataclass(frozen=True)
class Result(AttemptResult):
    """Result of a run: of its last attempt, and in short how each of them ended."""

    advice: str
    traceback: str
    codes: Mapping[int, int | None]
    """The exit code of every rank, 128 + signal for a killed one; None: it never started."""
    hosts: Mapping[str, str]
    """The end state of every host that took part: clean, or why that is unknown."""
    report: Mapping[str, object]
    """The last report of the first rank: accuracy, speed, files."""
    folder: Path
    saved: int = 0
    """The step of the newest checkpoint; 0: there is none."""
    resume: str = ""
    """The command that continues from it; empty when there is no checkpoint, or it is done."""
    attempts: tuple[AttemptResult, ...] = ()
    """The results of all attempts, this one included; several if the run was restarted."""

    @property
    def port_was_taken(self) -> bool:
        """Return True when no rank started because the master's port was taken."""
        started = any(code is not None for code in self.codes.values())
        return not started and "EADDRINUSE" in self.cause

    @property
    def was_cut_off(self) -> bool:
        """Return True when it ended because this machine lost all of its hosts at once."""
        return self.verdict == "failed" and self.cause == CUT_OFF

    @property
    def was_ended_for_hosts(self) -> bool:
        """Return True when all ranks have saved and ended so that lost hosts take part again."""
        return self.verdict == "interrupted" and self.cause == HOSTS_BACK

    def with_attempts(self, earlier: Result | None) -> Result:
        """Return the result of this attempt with those of the attempts before it."""
        names = [field.name for field in fields(AttemptResult)]
        this = AttemptResult(**{name: getattr(self, name) for name in names})
        if earlier is None:
            return replace(self, attempts=(this,))
        hosts = {**earlier.hosts, **self.hosts}  # one that was lost has no part in this attempt
        return replace(self, attempts=(*earlier.attempts, this), hosts=hosts)


def as_plain(result: Result) -> dict[str, Any]:
    """Return a result as result.json has it."""
    return {**asdict(result), "codes": dict(result.codes)}


def moved(value: object, remote: Path, local: Path) -> object:
    """Return a rank's report, paths in its run folder turned into local ones."""
    if isinstance(value, str) and Path(value).is_relative_to(remote):
        below = Path(value).relative_to(remote)
        return value if ".." in below.parts else str(local / below)
    return value
