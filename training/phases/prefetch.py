"""Fill the caches of all nodes before the first step (--prefetch).

Blocks that are there already are passed over, so a run that was stopped goes on where it was.
"""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from rackrun.contract import phases
from rackrun.training.phases.start import TrainingRun
from rackrun.training.run.recorder import RunRecorder
from rackrun.training.stop_requests import NOTHING, SAVE
from rackrun.units import data_size, duration

FETCHES = 8  # of a rank at once
MEETING_SECONDS = 1.0  # between two exchanges, so that none waits long in one
LINE_SECONDS = 30.0  # between two lines where a launcher shows the rest


def prefetch(run: TrainingRun, log: RunRecorder) -> int:
    """Store every block that belongs on this node; return the request that ends this early, or 0.

    All ranks return together. DataError where the data cannot be read.
    """
    log.progress.phase(phases.PREFETCH)
    ranks, began = run.ranks, time.monotonic()
    missing = run.data.cache.missing(ranks.local_rank, ranks.local_world)
    own_bytes = sum(each.block.bytes for each in missing)
    total = int(ranks.all_reduce_sum(torch.tensor(own_bytes)))
    reported, stored_bytes, blocks = began, 0, 0
    threads = ThreadPoolExecutor(FETCHES)
    jobs = deque(threads.submit(each.fetch) for each in missing)
    try:
        while True:
            # As many as end until the next exchange, in order.
            deadline = time.monotonic() + MEETING_SECONDS
            while jobs and (left := deadline - time.monotonic()) > 0:
                if wait([jobs[0]], left).done:
                    blocks, stored_bytes = blocks + 1, stored_bytes + jobs.popleft().result()
            numbers = torch.tensor([stored_bytes, len(jobs)])
            stored, remaining = ranks.all_reduce_sum(numbers).tolist()
            seconds = time.monotonic() - began
            if (request := run.agreed_request()) not in (NOTHING, SAVE):
                return request
            if not remaining:
                break
            text = _progress(stored, total, seconds)
            log.progress.prefetched(blocks, text)
            if log.progress.launched and time.monotonic() - reported > LINE_SECONDS:
                reported = time.monotonic()
                log.say(text)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    log.say(f"caches filled: {data_size(stored)} fetched in {duration(seconds)}")
    return NOTHING


def _progress(stored: int, total: int, seconds: float) -> str:
    left = duration((total - stored) * seconds / stored) if stored else "?"
    rate = data_size(stored / max(seconds, 1e-3))
    return f"filling the caches: {data_size(stored)} of {data_size(total)}  {rate}/s  {left} left"
