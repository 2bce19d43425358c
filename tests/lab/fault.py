"""A fault: what happens to a run, and what must come of it. `play` starts the run and looks."""

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEASE_SECONDS, HANG_SECONDS, CHECKPOINT_SECONDS = 3.0, 3.0, 2.0
LIMITS = (
    *("--lease-seconds", str(LEASE_SECONDS), "--hang-seconds", str(HANG_SECONDS)),
    *("--checkpoint-seconds", str(CHECKPOINT_SECONDS)),
)
"""What runs are started with, unless the options of a fault say otherwise."""


def with_limits(*options: str) -> tuple[str, ...]:
    """Return options for the launcher, and those of LIMITS that they do not have."""
    limits = zip(LIMITS[::2], LIMITS[1::2], strict=True)
    return (*(word for limit in limits if limit[0] not in options for word in limit), *options)


CLEAN_SECONDS = 10.0
"""After the launcher's end, until every host that was lost has ended its ranks by itself."""

ARRIVAL_SECONDS = 65.0
"""The same where a link may have broken while a program was sent, which is waited for."""


def nothing(run: Any) -> None:
    """Hurt or heal nothing."""


@dataclass(frozen=True)
class Fault:
    """One fault, and its required outcome. `run` is one of tests/lab/faulty_runs.py."""

    name: str
    codes: tuple[int, ...]
    """Exit codes of the launcher that are true."""

    cause: str
    """A word of the last line that names the cause; {victim} is the host's address."""

    seconds: float
    """Promised from the fault to the launcher's end, on an idle machine."""

    hurt: Callable[[Any], None] = nothing
    heal: Callable[[Any], None] = nothing
    started_as: str = "attached"
    moment: str = "step"
    """When it happens: at a step, or at one of MOMENTS of the start."""

    misdeed: str = ""
    """What the last rank does by itself at the moment, see tests/lab/fault_rank.py."""

    rank_seconds: float = 60.0
    """How long ranks train."""

    options: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    """What to run instead of the usual ranks."""

    loses_host: bool = False
    """The host of the fault cannot be verified at the end."""

    loses_result: bool = False
    """Whoever writes result.json is killed."""

    short: bool = False
    """It is played at every run of the suite, not only in long ones."""

    weight: int = field(default=1, compare=False)
    """How often a campaign draws it, relative to others."""

    def __str__(self) -> str:
        return f"{self.started_as} {self.name}"

    @property
    def promised_seconds(self) -> float:
        """Return the time promised from the fault to the end, with what ranks still have to do."""
        return self.seconds + (0.0 if self.rank_seconds > 30 else self.rank_seconds)

    @property
    def ends_launcher(self) -> bool:
        """Return True if the launcher itself is killed, so that it can say nothing."""
        return any(code in (-9, -3) for code in self.codes)


@dataclass
class Outcome:
    """The outcome of a fault; without violations, every promise was kept."""

    fault: Fault
    code: int | None = None
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    said: str = ""

    def __str__(self) -> str:
        return f"{self.fault}: {'; '.join(self.violations)}\n{self.said.strip()[-3000:]}"


def play(
    fault: Fault, lab: Any, folder: Path, slow: float, chance: random.Random | None = None
) -> Outcome:
    """Start a run, hurt it, wait for its end, heal, and look at what is left.

    Without `chance`, the fault hits the last host at once; `slow` is how often times may pass.
    """
    outcome = Outcome(fault)
    try:
        with lab.run(fault, folder, chance, slow) as run:
            _play(run, outcome, slow)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        # A run that does not start breaks a promise, too: a campaign goes on.
        outcome.violations.append(f"precondition: {error!r:.300}")
    return outcome


def _play(run: Any, outcome: Outcome, slow: float) -> None:
    fault = outcome.fault
    run.start()
    run.wait_for_the_moment()
    hurt_at = time.monotonic()
    fault.hurt(run)
    outcome.code, outcome.said = run.wait(fault.promised_seconds * 2 * slow + 30)
    outcome.seconds = time.monotonic() - hurt_at
    fault.heal(run)
    outcome.violations += wrong_end(outcome, run.victim, slow)
    run.settle((CLEAN_SECONDS if fault.moment == "step" else ARRIVAL_SECONDS) * slow)
    outcome.violations += run.left()
    outcome.violations += run.unwhole(outcome)
    outcome.violations += run.next_launch()


def wrong_end(outcome: Outcome, victim: str, slow: float) -> Iterator[str]:
    """Yield what is wrong with the exit code, the time and the words of a run."""
    fault, lines = outcome.fault, outcome.said.splitlines()
    if outcome.code is None:
        yield "the launcher hangs"
    elif outcome.code not in fault.codes:
        yield f"exit code {outcome.code}, not {' or '.join(map(str, fault.codes))}"
    if outcome.seconds > fault.promised_seconds * slow:
        yield f"took {outcome.seconds:.1f} s of {fault.promised_seconds:.0f} that were promised"
    if "internal error of rackrun" in outcome.said or '__main__.py", line' in outcome.said:
        yield "a traceback of the launcher"
    if outcome.said.count("Traceback (most recent") > 1:
        yield "more than one traceback"
    if "\x1b" in outcome.said.replace("\x1b[0m", ""):
        yield "an escape sequence on a plain screen"
    if fault.ends_launcher or outcome.code in (-2, -15, -1):
        return
    cause = fault.cause.format(victim=victim)
    if not lines:
        yield "no last line"
    elif not any(word in lines[-1].partition("; log: ")[0] for word in cause.split("|")):
        yield f"the last line does not say {cause!r}: {lines[-1][:200]!r}"
