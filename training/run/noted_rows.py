"""The rows of the index that each rank trains on, step by step: tests of exact epochs add them up.

They are written only where RACKRUN_NOTE_ROWS is set, which tests do:

    <run>/rows/rank-0.jsonl    {"time": 1795000.5, "step": 3, "world": 2, "rank": 0, "rows": [7, 4]}

A line is written before its step is computed: the step may count although this rank is killed a
moment later. A step that is lost is trained again, and then has a newer line of each rank.
"""

import json
import os
import time
from pathlib import Path

from rackrun.contract import variables
from rackrun.training.data.samples import Batch
from rackrun.training.ranks import Ranks


def note_rows(run: Path, ranks: Ranks, step: int, batch: Batch) -> None:
    """Write the rows of this rank's batch, which has them where the order was planned."""
    if variables.NOTE_ROWS not in os.environ or batch.rows is None:
        return
    of_rank = {"step": step, "world": ranks.world, "rank": ranks.rank, "rows": batch.rows.tolist()}
    path = run / "rows" / f"rank-{ranks.rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time(), **of_rank}) + "\n")
