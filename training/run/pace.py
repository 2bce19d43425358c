"""How fast a run trains: images and seconds since it began or was resumed, and of its epoch."""

import time
from typing import Any, NamedTuple

from training.counts import Counts, Scaling


class Epoch(NamedTuple):
    """What an epoch's steps have added up to, over all ranks."""

    counts: Counts = Counts()
    seconds: float = 0.0
    skipped_steps: int = 0
    """As gradients overflowed float16."""

    @property
    def images_per_second(self) -> float:
        """Return the speed of all ranks."""
        return self.counts.samples / max(self.seconds, 1e-9)


class Pace:
    """The clock of training, which stands still while a run evaluates or saves."""

    def __init__(self) -> None:
        self.begun = 0
        """The step at which the run began or was resumed."""
        self.images = 0
        """Since then, of all ranks."""
        self.seconds = 0.0
        """That they took."""
        self._epoch = Epoch()
        self._clock = time.monotonic()

    def start(self) -> None:
        """Start the clock: training begins or continues."""
        self._clock = time.monotonic()

    def advance(self, counts: Counts, scaling: Scaling | None) -> float:
        """Add the steps since the last call or start; return their images per second."""
        seconds = time.monotonic() - self._clock
        self._clock += seconds
        self.seconds += seconds
        self.images += counts.samples
        epoch = self._epoch
        self._epoch = Epoch(
            epoch.counts.plus(counts),
            epoch.seconds + seconds,
            epoch.skipped_steps + (scaling.skipped if scaling else 0),
        )
        return counts.samples / seconds

    def seconds_left(self, step: int, steps: int) -> float:
        """Return how long the steps after this one will take, as those since the begin did."""
        return (steps - step) * self.seconds / max(step - self.begun, 1)

    def end_epoch(self) -> Epoch:
        """Return the sums of the epoch, and begin to count the next one."""
        epoch, self._epoch = self._epoch, Epoch()
        return epoch

    @property
    def images_per_second(self) -> float:
        """Return the speed of all ranks since the begin."""
        return self.images / max(self.seconds, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """Return what another rank needs to go on with this count."""
        return {
            "begun": self.begun,
            "run": [self.images, self.seconds],
            "epoch": [list(self._epoch.counts), self._epoch.seconds, self._epoch.skipped_steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on another rank."""
        self.begun = state["begun"]
        self.images, self.seconds = state["run"]
        counts, seconds, skipped_steps = state["epoch"]
        self._epoch = Epoch(Counts(*counts), seconds, skipped_steps)
