"""A run at a moment as plain values: for the dashboard, and for state.json."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from sys import float_info
from typing import Annotated

from rackrun.contract import phases
from rackrun.launcher.run.events import Usage
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.state import HostState, RunState
from rackrun.run_files import MOST_BYTES
from rackrun.run_folder import RunFolder
from rackrun.shapes import Misshapen, Real, Shape, Whole, between, matches, parsed_file
from rackrun.terminal import UNSAFE, one_line
from rackrun.units import plural

BUSY = {
    phases.START: "loading",
    phases.DOWNLOAD: "loading",
    phases.PREFETCH: "filling cache",
    phases.COMPILE: "compiling",
    phases.DATA: "lacks data",
    phases.TRAIN: "training",
    phases.EVALUATE: "evaluating",
    phases.SAVE: "saving",
}
"""Phases that a rank reports, as states of its host; the first that one of its ranks is in."""
LINE_CHARACTERS = 200
Measure = Annotated[float, between(-float_info.max, float_info.max)]
"""What a rank measured: the loss of a run that diverges is larger than any `Real`."""
Text = Annotated[str, matches(f"[^{UNSAFE.pattern[1:-1]}]*")]
"""What a terminal shows and does not obey: ranks may write into the folder of a run, too."""
BROKEN, WAITED_FOR, HEALTHY, ENDED = range(4)
"""The order of hosts by state, the most urgent first."""
URGENCY = {
    **dict.fromkeys(("lost", "failed", "not clean", "not verified", "stopped"), BROKEN),
    **dict.fromkeys(("slow", "lacks data", "connecting", "starting", "stopping"), WAITED_FOR),
    **dict.fromkeys(("done", "clean"), ENDED),
}


class HostView(Shape, frozen=True):
    """One host."""

    name: Text
    node: Whole
    state: Text
    urgency: Whole
    step: Whole
    """The step of its slowest rank; 0: none yet."""
    share: Real | None
    """Its part of the images of a step, with --balance auto."""
    usage: Usage | None
    last_line: Text
    """The newest line of its ranks, finished or not."""


class RunView(Shape, frozen=True):
    """A run at a moment."""

    name: Text
    run_id: Text
    folder: Text
    machines: Text
    """Ranks, hosts and GPUs, in words."""
    dataset: Text
    """What is read; empty while the first rank has not reported it."""
    seconds: Real
    has_first_rank: bool
    """False on the other nodes of a scheduler's job, which would print the same progress."""
    phase: Text
    """The phase of the first rank; empty while it has not reported."""
    epoch: Whole
    epochs: Whole
    epoch_step: Whole
    epoch_steps: Whole
    step: Whole
    steps: Whole
    loss: Measure | None
    accuracy: Measure | None
    images_per_second: Measure | None
    data_share: Real | None
    """The part of the time for which ranks waited for data."""
    seconds_left: Real | None
    """Seconds until the end of the run."""
    best: Measure | None
    """The best validation accuracy so far."""
    checkpoint: Whole
    """The step of the last checkpoint; 0: none yet."""
    all_running: bool
    """Every rank runs."""
    hosts: tuple[HostView, ...]
    """The failed ones first."""

    @property
    def all_have_stepped(self) -> bool:
        """Return True once every rank has taken its first step."""
        return all(host.step > 0 for host in self.hosts)


def read_view(folder: RunFolder) -> RunView | None:
    """Return what state.json shows now; None where there is none."""
    with suppress(OSError, Misshapen):
        return parsed_file(folder.state, RunView, MOST_BYTES)
    return None


def view(
    run: RunState, name: str, folder: RunFolder, now: float, last_lines: Mapping[int, str]
) -> RunView:
    """Return a run at the moment `now` of the monotonic clock."""
    first, fields = run.lead, run.lead.fields
    total = fields.get("epoch_steps", 0)
    hosts = [_host_view(run, host, last_lines.get(host.plan.node, "")) for host in run.hosts]
    return RunView(
        name=one_line(name),
        run_id=run.plan.run_id,
        folder=one_line(str(folder.path)),
        machines=machines(run.plan),
        dataset=one_line(fields.get("dataset", "")),
        seconds=max(0.0, now - run.started_at),
        has_first_rank=run.plan.has_first_rank,
        phase=first.phase,
        epoch=fields.get("epoch", 0),
        epochs=fields.get("epochs", 0),
        epoch_step=first.step - max(0, fields.get("epoch", 0) - 1) * total,
        epoch_steps=total,
        step=first.step,
        steps=fields.get("steps", 0),
        loss=fields.get("loss"),
        accuracy=fields.get("accuracy"),
        images_per_second=fields.get("images_per_second"),
        data_share=fields.get("data_share"),
        seconds_left=first.seconds_left(now),
        best=fields.get("best"),
        checkpoint=fields.get("checkpoint", 0),
        all_running=all(rank.running for rank in run.ranks),
        hosts=tuple(sorted(hosts, key=lambda host: host.urgency)),
    )


def _host_view(run: RunState, host: HostState, last_line: str) -> HostView:
    ranks = run.ranks_of(host.plan.node)
    slowest = min(ranks, key=lambda rank: rank.step)
    state = state_of(run, host)
    shares = [rank.fields.get("share", 0.0) for rank in ranks]
    return HostView(
        name=host.plan.name,
        node=host.plan.node,
        state=state,
        urgency=URGENCY.get(state, URGENCY.get(state.partition(" ")[0], HEALTHY)),
        step=slowest.step,
        share=sum(shares) or None,
        usage=host.usage,
        last_line=last_line[:LINE_CHARACTERS],
    )


def state_of(run: RunState, host: HostState) -> str:
    """Return the state of a host in a word or two."""
    ranks = run.ranks_of(host.plan.node)
    if host.frozen:
        return "stopped"
    if host.state in ("running", "done") and any(r.ended and r.ended.exit_code for r in ranks):
        return "failed"
    if host.state != "running":
        return host.state
    rank_phases = {rank.phase for rank in ranks if rank.running}
    busy = [busy_state for phase, busy_state in BUSY.items() if phase in rank_phases]
    silent = "starting" if run.plan.task else "running"  # until a task has imported torch
    busy_state = busy[0] if busy else "finishing" if phases.DONE in rank_phases else silent
    if busy_state == BUSY[phases.TRAIN] and (why := _slowed_by(run, host)):
        return f"slow {why}"
    return busy_state


def _slowed_by(run: RunState, host: HostState) -> str:
    # Its GPUs' own reason where the ranks use some; otherwise what the ranks have measured.
    gpus = host.usage.gpus if host.usage and host.plan.gpus else ()
    reason = next((gpu.slowed for gpu in gpus if gpu.slowed), "")
    return reason or (run.slow.why if run.slow and run.slow_host is host else "")


def machines(plan: Plan) -> str:
    """Return ranks and hosts, how many ranks each host has, and the models of the GPUs."""
    counts = [host.processes for host in plan.hosts]
    part = "" if sum(counts) == plan.world_size else f"{sum(counts)} of "  # one node of several
    where = f"{part}{plural(plan.world_size, 'rank')} on {plural(len(plan.hosts), 'host')}"
    least, most = min(counts), max(counts)
    each = f"{least} each" if least == most else f"{least} to {most} each"
    models = dict.fromkeys(host.gpu_model for host in plan.hosts if host.gpu_model)
    shown = [where, each if len(counts) > 1 and most > 1 else "", " and ".join(models)]
    return one_line(", ".join(filter(None, shown)))
