"""Fill the caches of all hosts before the first step (--prefetch).

Shards that are there already are passed over, so a run that was stopped goes on where it was.
"""

import time

import torch

from rackrun.contract import phases
from rackrun.training.stop_requests import NOTHING, SAVE
from rackrun.training.training_run import TrainingRun
from rackrun.units import data_size, duration

MEETING_SECONDS = 1.0  # between two exchanges
LINE_SECONDS = 30.0  # between two lines where a launcher shows the rest


def prefetch(run: TrainingRun) -> int:
    """Wait for the shards that hosts fetch; return the request that ends this early, or 0.

    All ranks return together.
    """
    log = run.log
    log.phase(phases.PREFETCH)
    cache, began, reported = run.data.cache, time.monotonic(), 0.0
    total = _sum(run, cache.missing_bytes())
    while True:
        filling = _sum(run, int(cache.is_filling))
        fetched, seconds = _sum(run, cache.fetched_bytes), time.monotonic() - began
        if (request := run.exchange.agreed_now()) not in (NOTHING, SAVE):
            return request
        if not filling:
            break
        text = _progress(fetched, total, seconds)
        log.report(epoch_step=cache.fetched_bytes >> 20)
        log.show(text)
        if log.launched and seconds - reported > LINE_SECONDS:
            reported = seconds
            log.say(text)
        time.sleep(MEETING_SECONDS)
    missing = _sum(run, cache.missing_bytes())
    rest = f"; {data_size(missing)} are read from {run.config.data}" if missing else ""
    log.say(f"caches filled: {data_size(fetched)} fetched in {duration(seconds)}{rest}")
    return NOTHING


def _sum(run: TrainingRun, number: int) -> int:
    return int(run.ranks.all_reduce_sum(torch.tensor(number)))


def _progress(fetched: int, total: int, seconds: float) -> str:
    left = duration((total - fetched) * seconds / fetched) if fetched else "?"
    rate = data_size(fetched / max(seconds, 1e-3))
    return f"filling the caches: {data_size(fetched)} of {data_size(total)}  {rate}/s  {left} left"
