"""Images by speed (--balance auto): ranks get images in proportion to how fast they compute them.

With requests, all ranks learn how long forward and backward of each of them took in the steps that
have ended last (training.stop_requests). From these numbers all find the same cut. It holds
some steps later, of which no loader worker has begun anything.

A cut moves when the slowest rank would be done so much earlier that chance does not explain it.
Where the times vary by a tenth, the median of n of them varies by 0.125 / sqrt(n), and four times
that moves the cut: 11 % after 20 exchanges, 4 % after 160. What counts are the newest 160 under the
present cut, so that a GPU that is throttled gives images away again.

A rank computes at most --batch-size images at a time, whatever its share: a larger one is computed
in several parts. So no rank needs more memory than it has shown that it has.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from torch import nn

from rackrun.training.config import Config
from rackrun.training.data.order import MOST_SHARE, Cut, Numbers, Steps
from rackrun.training.ranks import Ranks
from rackrun.training.setup import TrainingRun
from rackrun.training.step_times import UNREAD_STEPS, StepTimes
from rackrun.training.stragglers import Waiting

SETTLING_STEPS = UNREAD_STEPS  # under another cut: what is sent after these was computed under it
JUDGED_AT = (20, 40, 80)  # exchanges under a cut, and then every MOST_TIMES of them
MOST_TIMES = 160
CHANCE = 0.5  # over the square root of the number of times: what differs by less may be chance
LEAST_SHARE = 8  # a rank gets an eighth of its even part at least

Times = npt.NDArray[np.float64]


def begin_balance(run: TrainingRun, times: StepTimes) -> "Balance | None":
    """Begin to look for a faster cut; None where only an even one is possible.

    A line says why, unless this rank is alone.
    """
    if run.ranks.world == 1:
        return None
    state, log = run.state, run.log
    if why := why_even(state.model, run.data.steps.batch, run.ranks.world):
        log.say(f"--balance auto: steps are split evenly, since {why}")
        return None
    balance = Balance(run.ranks, run.data.steps, state.step, times.compute_nanoseconds)
    run.checkpoints.images_by_rank = balance.counts
    log.shares(state.step, balance.counts)
    return balance


def why_even(model: nn.Module, batch: int, world: int) -> str:
    """Return why steps of `batch` images on `world` ranks can only be cut evenly; empty if not."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "batch norms exchange their statistics and all ranks compute equally many parts"
    if batch < 2 * world:
        return f"{batch} images for {world} ranks leave no choice; type a larger --global-batch"
    return ""


def remedy(config: Config, balance: "Balance | None", waiting: Waiting, step: int) -> str:
    """Return what is done, or could be done, about a rank that is late by its compute."""
    if waiting.why != "compute":
        return ""
    if balance:
        return balance.remedy(waiting.rank, step)
    if config.balance == "auto" or config.unbalanceable:
        return ""
    return "--balance auto gives it fewer images"


class Balance:
    """Finds cuts by the speeds of the ranks, the same on every rank."""

    def __init__(
        self, ranks: Ranks, steps: Steps, step: int, compute_nanoseconds: Callable[[], int]
    ) -> None:
        """Begin after this step, under the cut that the next steps have.

        `compute_nanoseconds`: what steps of this rank took that have ended since it was asked for
        last, on average; 0 if none has.
        """
        self._step = self._sent_at = step
        self._ranks = ranks
        self._batch, self._lead = steps.batch, steps.lead
        self._compute_nanoseconds = compute_nanoseconds
        even = self._batch / ranks.world
        self._least = max(2, round(even / LEAST_SHARE))
        self._most = min(self._batch, int(even) * MOST_SHARE)
        self._times = deque[Sequence[int]](maxlen=MOST_TIMES)
        self._begin(steps.cut(step + self._lead), step)

    def _begin(self, cut: Cut, step: int) -> None:
        self.cut = cut
        """The newest cut, which may hold from some steps later on only."""
        self._settled = max(step, cut.step) + SETTLING_STEPS
        self._exchanges = 0  # under this cut, that count
        self._times.clear()

    def sent(self) -> list[int]:
        """Return what this rank sends with a step: of each number all ranks get the largest."""
        self._sent_at = self._step
        times = [0] * self._ranks.world
        times[self._ranks.rank] = self._compute_nanoseconds()
        return times

    def next_cut(self, step: int, agreed: Sequence[int]) -> Cut | None:
        """Return the cut that all ranks go on with after this step, None if it stays.

        `agreed` is the largest of what was sent, empty if no exchange ends with the step.
        """
        self._step = step
        if not agreed or self._sent_at <= self._settled:
            return None
        self._times.append(agreed)
        self._exchanges += 1
        if self._exchanges not in JUDGED_AT and self._exchanges % MOST_TIMES:
            return None
        counts = self._better_counts()
        if counts is None:
            return None
        self._begin(Cut.into(counts, step + self._lead), step)
        return self.cut

    @property
    def counts(self) -> list[int]:
        """The samples that each rank gets of a full step, by the newest split."""
        counts: list[int] = self.cut.sizes(self._batch).tolist()
        return counts

    def remedy(self, rank: int, step: int) -> str:
        """Return what is done about a rank that is late by its compute."""
        count = self.counts[rank]
        since = f" from step {self.cut.step + 1} on" if self.cut.step > step else ""
        limit = ", the fewest that it may" if count == self._least else ""
        return f"it gets {count} of {self._batch} images a step{since}{limit}"

    def _better_counts(self) -> Numbers | None:
        times = np.array(self._times, np.float64)
        times[times == 0] = np.nan  # of a rank whose GPU was behind: nothing new from it
        if (np.isfinite(times).sum(axis=0) < len(times) / 2).any():
            return None
        counts = self.cut.sizes(self._batch)
        # Medians: a step that something else interrupted says nothing of how fast a GPU is.
        costs = np.nanmedian(times, axis=0) / counts
        better = fastest_counts(costs, self._batch, self._least, self._most)
        gain = (counts * costs).max() / (better * costs).max() - 1
        return better if gain > CHANCE / len(times) ** 0.5 else None


def fastest_counts(costs: Times, batch: int, least: int, most: int) -> Numbers:
    """Return how many of `batch` images each rank gets so that the slowest is done the soonest.

    `costs` is the time that each needs for an image.
    """
    counts: Numbers = np.full(costs.size, least)
    # One by one, to the rank that is done the soonest with one more.
    for _ in range(batch - int(counts.sum())):
        counts[np.where(counts < most, (counts + 1) * costs, np.inf).argmin()] += 1
    return counts
