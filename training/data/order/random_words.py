"""Random numbers that are the same in every version of numpy: raw output of PCG64.

O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random
Number Generation" (2014).
"""

import numpy as np
import numpy.typing as npt

PHASE, BLOCKS, SLOTS, MIXING = range(4)  # the purposes of random words in an epoch


class Stream:
    """The random 64-bit words of an epoch for one purpose, from any place on.

    PCG64 skips n words in a time that grows with log n (section 4.3.1), so a reader draws the words
    of its own samples only.
    """

    def __init__(self, seed: int, epoch: int, purpose: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence((seed, epoch, purpose)))
        self._next = 0

    def random_raw(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """Return that many words from number `first` on."""
        self._bits.advance(first - self._next)  # backwards, too: the generator is a circle
        self._next = first + count
        return self._bits.random_raw(count)


def permutation(seed: int, epoch: int, purpose: int, size: int) -> npt.NDArray[np.int32]:
    """Return the numbers below `size` in random order."""
    random_raw = Stream(seed, epoch, purpose).random_raw(0, size)
    # Stable, here and in `epoch.mixed`: equal words must not depend on the version of numpy.
    return np.argsort(random_raw, kind="stable").astype(np.int32)


def fraction(seed: int, epoch: int, purpose: int) -> float:
    """Return a number from 0 to below 1."""
    return float(Stream(seed, epoch, purpose).random_raw(0, 1)[0] / 2.0**64)
