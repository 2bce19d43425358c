"""What ranks tell one another during a step beside gradients: requests, and rows for the ledger.

The exchange begins with the step and overlaps with it, so that no step waits for it. It is complete
on every rank before anything of the step counts: what a rank knows of a step that it has taken, it
knows of all ranks, also of one that is lost a moment later.
"""

from collections.abc import Callable

import numpy as np
import torch

from training.ranks import Ranks, Rows

Note = Callable[[Rows, Rows], None]
"""Takes the number of samples of each rank, and their rows in the index, by rank."""


class StepExchange:
    """The exchange of one step."""

    def __init__(self, ranks: Ranks, pending: Callable[[], int]) -> None:
        """Begin to exchange this rank's request, of which all ranks follow the strongest."""
        self._ranks = ranks
        self._pending = pending
        self._strongest = pending if ranks.world == 1 else ranks.all_reduce_max_later(pending())
        self._agreed = 0
        self._rows: Callable[[], torch.Tensor] | None = None
        self._note: Note | None = None

    def send_rows(self, rows: torch.Tensor, most: int, note: Note) -> None:
        """Exchange rows as well, `most` of a rank at most; `note` takes those of all ranks."""
        sent = torch.zeros(1 + most, dtype=torch.int32)
        sent[0] = len(rows)
        sent[1 : 1 + len(rows)] = rows
        self._rows, self._note = self._ranks.all_gather_later(sent), note

    def complete(self) -> None:
        """Wait until all of it is here."""
        self._agreed = self._strongest()
        if self._rows and self._note:
            table, self._rows = self._rows().numpy(), None
            counts, rows = table[:, 0].copy(), table[:, 1:]  # (world,), (world, most)
            self._note(counts, rows[np.arange(rows.shape[1]) < counts[:, None]])

    @property
    def request(self) -> int:
        """The strongest request of all ranks, once the exchange is complete."""
        return self._pending() if self._ranks.world == 1 else self._agreed
