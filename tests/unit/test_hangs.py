"""When ranks hang: how long which phase may take, and which rank is to blame."""

import pytest

from rackrun.launcher.output.run_view import state_of
from rackrun.launcher.run.events import Computing, RankStarted, Report
from rackrun.launcher.run.job import TaskWork, Work
from rackrun.launcher.run.settings import Limits
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision.hangs import find_hang
from rackrun.launcher.supervision.root_cause import cause_of
from rackrun.shards.http_source import Timeouts
from tests.unit.planned import PROGRAM, plan_of

LIMITS = Limits(hang_seconds=60)


def make_run(ranks: int, work: Work = PROGRAM) -> RunState:
    run = RunState(plan_of("a", slots=ranks, work=work), 0.0)
    for rank in range(ranks):
        run.take(RankStarted(0, rank, 100 + rank), 0.0)
    return run


def report(run: RunState, now: float, rank: int, **fields: object) -> None:
    run.take(Report(0, rank, {"rank": rank, **fields}), now)


def test_slow_steps_raise_the_limit():
    """With steps of 30 s the limit is ten of them; with short ones it is a minute."""
    run = make_run(1)
    for step in range(1, 6):
        report(run, 30.0 * step, 0, phase="train", step=step)
    assert find_hang(run, LIMITS, 150 + 299) is None
    assert find_hang(run, LIMITS, 150 + 301) is not None
    quick = make_run(1)
    for step in range(1, 6):
        report(quick, 0.1 * step, 0, phase="train", step=step)
    assert find_hang(quick, LIMITS, 0.5 + 59) is None
    assert find_hang(quick, LIMITS, 0.5 + 61) is not None


def test_compiling_has_the_limit_of_saving():
    """At the first step or at a later one, for all that wait; then steps are judged as before."""
    run = make_run(2)
    for rank in (0, 1):
        report(run, 1.0, rank, phase="train")
    report(run, 2.0, 1, phase="compile")
    assert find_hang(run, LIMITS, 1 + 899) is None
    assert find_hang(run, LIMITS, 2 + 901) is not None
    report(run, 800.0, 1, phase="train")
    for rank in (0, 1):
        report(run, 801.0, rank, phase="train", step=1)
    assert find_hang(run, LIMITS, 801 + 59) is None
    assert find_hang(run, LIMITS, 801 + 61) is not None


def test_a_rank_that_waits_for_data_has_the_limit_of_its_reader():
    """A server that is away for two minutes is no hang, also of those that wait for that rank."""
    run = make_run(2)
    for rank in (0, 1):
        report(run, 1.0, rank, phase="train", step=7)
    report(run, 6.0, 1, phase="data")
    assert LIMITS.hang_seconds == Limits().hang_seconds
    assert find_hang(run, LIMITS, 6 + Timeouts().total_seconds + 50) is None
    assert state_of(run, run.hosts[0]) == "lacks data"
    hang = find_hang(run, LIMITS, 6 + 181)
    assert hang and (hang.suspects[1].rank, hang.suspects[1].text) == (
        1,
        "no progress for 181 s waiting for data after step 7",
    )


def test_computing_before_the_first_timed_step_has_the_limit_of_compiling():
    """No endless loop, and no step once the pace of steps is known."""
    run = make_run(2)
    for rank in (0, 1):
        report(run, 1.0, rank, phase="train")
    for second in range(3, 2000, 3):
        run.take(Computing(0, 1), float(second))
        hang = find_hang(run, LIMITS, float(second))
        assert (hang is not None) == (second > 1 + 15 * 60)
    for rank in (0, 1):
        report(run, 2000.0, rank, phase="train", step=1)
        report(run, 2001.0, rank, phase="train", step=2)
    run.take(Computing(0, 1), 2055.0)
    assert find_hang(run, LIMITS, 2062.0) is not None


def test_a_task_that_never_reports_has_the_limit_of_its_start():
    """Every task reports: one that does not get as far, in an import of torch, say, hangs."""
    run = make_run(2)
    assert find_hang(run, LIMITS, 10_000.0) is None
    task = make_run(2, TaskWork("catdog"))
    assert find_hang(task, LIMITS, 599.0) is None
    hang = find_hang(task, LIMITS, 601.0)
    assert hang and hang.suspects[0].text == "no progress for 601 s before its first report"


def test_a_download_of_weights_has_hours():
    """What stands still fails by itself; the ranks of other hosts wait as long."""
    run = make_run(2)
    for rank in (0, 1):
        report(run, 1.0, rank, phase="download")
    report(run, 2.0, 1, phase="start")
    assert find_hang(run, LIMITS, 3 * 3600) is None


def test_peers_of_a_rank_that_saves_are_not_judged():
    """One rank saves for ten minutes while the others wait: no hang; an hour is too long."""
    run = make_run(3)
    for rank in range(3):
        report(run, 1.0, rank, phase="train", step=10)
    report(run, 2.0, 0, phase="save")
    assert find_hang(run, LIMITS, 602) is None
    assert find_hang(run, LIMITS, 3602) is not None


def test_a_report_without_progress_is_no_sign_of_life():
    """The same step again and again, as a thread might send it, does not help."""
    run = make_run(1)
    for second in range(100):
        report(run, float(second), 0, phase="train", step=5)
    hang = find_hang(run, LIMITS, 100.0)
    assert hang is not None
    assert "step 5" in hang.text


def test_the_furthest_behind_is_to_blame():
    """Of ranks that all stand still, the one with the fewest steps is named."""
    run = make_run(3)
    for rank, step in ((0, 41), (1, 40), (2, 41)):
        report(run, 1.0, rank, phase="train", step=step)
    hang = find_hang(run, LIMITS, 100.0)
    assert hang is not None
    assert [suspect.rank for suspect in hang.suspects] == [1, 0, 2]
    assert cause_of(hang, lambda *source: "").rank == 1


def test_who_moves_is_no_suspect():
    """One of three ranks goes on where it does not need the others: it is not among those."""
    run = make_run(3)
    for rank in range(3):
        report(run, 1.0 + rank / 10, rank, phase="train", step=5)
    report(run, 59.0, 0, phase="train", step=5, epoch_step=5)
    hang = find_hang(run, LIMITS, 61.5)
    assert hang is not None
    assert (hang.rank, [suspect.rank for suspect in hang.suspects]) == (None, [1, 2])


def stack(file: str, function: str) -> str:
    return (
        "Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n"
        f'  File "{file}", line 7 in {function}\n  File "train.py", line 9 in <module>\n\n'
    )


LOOPS = stack("/code/loader.py", "read")
WAITS = [
    stack("/x/site-packages/torch/distributed/distributed_c10d.py", "all_reduce"),
    stack("/x/site-packages/torch/autograd/graph.py", "_engine_run_backward"),
    stack("/x/site-packages/torch/nn/parallel/distributed.py", "forward"),
]


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("rank", range(3))
def test_the_stacks_say_who_waits_and_who_is_waited_for(rank, waits):
    """Reports come now and then, so the others may seem to be behind: the stacks count for more.

    A rank that could not even write its stack is the one as well.
    """
    run = make_run(3)
    for one in range(3):
        report(run, 1.0, one, phase="train", step=40 + (one == rank))
    hang = find_hang(run, LIMITS, 100.0)
    assert hang is not None
    for its in (LOOPS, ""):
        cause = cause_of(hang, lambda node, one, stream, its=its: its if one == rank else waits)
        assert (cause.rank, cause.exit_code) == (rank, 75)
        assert cause.text.startswith("no progress for 99 s at step 41")
        assert cause.traceback == its.partition("\n\n")[2].rstrip()


def test_where_all_wait_at_one_step_no_rank_is_named():
    """The network, or a rank that is stuck in the middle of it: that is said."""
    run = make_run(3)
    for one in range(3):
        report(run, 1.0, one, phase="train", step=40)
    hang = find_hang(run, LIMITS, 100.0)
    assert hang is not None
    text = cause_of(hang, lambda *source: WAITS[0]).text
    assert text.endswith(", like all 3 ranks that run: look at their stacks, and at the network")


@pytest.mark.parametrize("phase", ["start", "evaluate", "save", "done"])
def test_other_phases_have_more_time(phase):
    """Loading, evaluating, saving and finishing may be silent for several limits."""
    run = make_run(1)
    report(run, 1.0, 0, phase=phase)
    assert find_hang(run, LIMITS, 1 + 299) is None
    assert find_hang(run, LIMITS, 1 + 901) is not None


def test_a_suspended_launcher_reports_no_hang():
    """After the lid was closed for an hour, the ranks have their time again."""
    run = make_run(1)
    report(run, 1.0, 0, phase="train", step=1)
    run.forgive(3600.0)
    assert find_hang(run, LIMITS, 3630.0) is None
