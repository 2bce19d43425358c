"""Hangs: a rank without progress is named with its stack; a slow or silent one is not."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from rackrun.launcher.output.run_view import state_of
from rackrun.launcher.run.events import Computing, RankStarted, Report
from rackrun.launcher.run.job import Command, Job, Limits, TaskWork, Work
from rackrun.launcher.run.plan import PlannedHost, make_plan
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision.hangs import find_hang
from rackrun.launcher.supervision.root_cause import cause_of
from rackrun.run_folder import RunFolder
from rackrun.shards.http.connection import Timeouts
from tests.lab import warm
from tests.lab.hosts import BUSY
from tests.lab.waiting import until
from tests.launcher.drive import Drive

LIMITS = Limits(hang_seconds=60)
REPORTING = (
    "import json, os, socket, sys, time\n"
    "rank = int(os.environ['RANK'])\n"
    "ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "ear.connect(os.environ['RACKRUN_REPORTS'])\n"
    "def report(**fields): ear.send(json.dumps({'rank': rank, **fields}).encode())\n"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", REPORTING + code]


def test_a_rank_that_stops_reporting_is_named_with_its_stack(tmp_path):
    """One rank sleeps in a step: 75, rank and step are named, every rank's stack is in its log."""
    code = (
        "def stuck(): time.sleep(999)\n"
        "for step in range(1, 1000):\n"
        "    report(phase='train', step=step)\n"
        "    if rank == 1 and step == 7: stuck()\n"
        "    time.sleep(0.02)\n"
        "    if step > 20: stuck()\n"
    )
    drive = Drive(tmp_path, python(code), slots=[2])
    assert drive.wait() == 75
    assert drive.result["rank"] == 1
    assert re.search(r"at step 7, at <string>:\d+ in stuck$", drive.result["cause"])
    assert drive.err.count("in stuck") == 2  # in the stack and in the last line
    for rank in range(2):
        assert "in stuck" in drive.log(rank, "err").read_text()
    assert not drive.alive()


def test_ranks_that_wait_for_one_that_left_are_named(tmp_path):
    """Uneven steps without a plan: one rank has left, the one that waits for it ends with 75."""
    code = (
        "for step in range(1, 6 + 4 * rank):\n"
        "    report(phase='train', step=step); time.sleep(0.02)\n"
        "if rank: time.sleep(999)\n"
    )
    drive = Drive(tmp_path, python(code), slots=[1, 1])
    assert drive.wait() == 75
    assert drive.result["rank"] == 1
    assert "no progress" in drive.result["cause"]
    assert drive.result["cause"].endswith("; rank 0 on 127.0.0.2 had ended with 0 at step 5")
    assert drive.result["codes"]["0"] == 0
    assert not drive.alive()


@pytest.mark.parametrize("fields", ["", "step=step", "loss=1.5"])
def test_a_report_without_a_phase_counts(tmp_path, fields):
    """The socket requires `rank` alone: a rank that reports and then stands still ends with 75."""
    code = (
        "for step in range(1, 8):\n"
        f"    report({fields})\n"
        "    time.sleep(0.3)\n"  # longer in all than the limit: each report without a step counts
        "time.sleep(999)\n"
    )
    drive = Drive(tmp_path, python(code))
    assert drive.wait() == 75
    assert re.search(r"at <string>:\d+ in <module>", drive.result["cause"])
    assert not drive.alive()


COMPUTING = (
    "report(phase='train')\n"
    "until = time.monotonic() + 8\n"
    "if rank == 0:\n"
    "    while time.monotonic() < until: sum(range(10_000))\n"
    "else: time.sleep(8.5)\n"  # in a collective, for rank 0
    "if os.environ.get('STUCK'): time.sleep(999)\n"
    "report(phase='train', step=1)\n"
)


def test_a_first_step_that_computes_is_slow_and_no_hang(tmp_path):
    """A rank computes for longer than the limit, and another one waits for it: exit code 0."""
    drive = Drive(tmp_path, python(COMPUTING), slots=[2], limits={"hang_seconds": HANG_SECONDS})
    assert drive.wait() == 0, drive.err


def test_a_rank_that_stands_still_before_its_first_step_hangs(tmp_path):
    """Also when it has computed before: it is ended, with its stack, one limit after that."""
    options = {"environment": [("STUCK", "1")], "limits": {"hang_seconds": HANG_SECONDS}}
    drive = Drive(tmp_path, python(COMPUTING), slots=[2], **options)
    assert drive.wait() == 75
    assert re.search(r"before its first step, at <string>:\d+ in <module>", drive.result["cause"])


def test_a_rank_in_native_code_still_shows_its_stack(tmp_path):
    """A rank that holds the interpreter's lock in a native loop is named, with its Python line."""
    code = (
        "import ctypes\n"
        "report(phase='train', step=1); time.sleep(0.1); report(phase='train', step=2)\n"
        "ctypes.PyDLL(None).sleep(999)\n"
    )
    drive = Drive(tmp_path, python(code))
    assert drive.wait() == 75
    assert 'File "<string>", line 8 in <module>' in drive.log(0, "err").read_text()


RING = (
    "import ctypes, pathlib\n"
    "import torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "told, one = 0.0, torch.ones(1)\n"
    "for step in range(1, 1_000_000):\n"
    "    if step > 200 and pathlib.Path(f'stuck-{rank}').exists():\n"
    "        ctypes.PyDLL(None).sleep(999)\n"  # holds the interpreter's lock
    "    dist.all_reduce(one); time.sleep(0.002)\n"
    "    if time.monotonic() > told + 0.2:\n"  # as training.run.progress does
    "        told = time.monotonic(); report(phase='train', step=step)\n"
    "    if step == 200: print('ready', os.getpid(), flush=True)\n"
)
HANG_SECONDS, KILL_SECONDS = 3.0, 10.0


def hung(tmp_path: Path, how: str, rank: int, real: bool = False) -> Drive:
    """Run an all-reduce on two hosts in which a rank is stopped or hangs; return the launch."""
    limits = {"hang_seconds": HANG_SECONDS}
    its_python = sys.executable if how == "stopped" else str(warm.interpreter())
    command = [its_python, "-c", REPORTING + RING]
    options = {"real": real, "python": str(warm.interpreter()), "limits": limits}
    drive = Drive(tmp_path, command, slots=[1, 1], **options)
    logs = [drive.log(one, "out", host=one) for one in range(2)]
    until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))
    if how == "stopped":
        os.kill(int(logs[rank].read_text().split()[1]), signal.SIGSTOP)
    else:
        (drive.folder / f"stuck-{rank}").touch()
    since = time.monotonic()
    assert drive.wait() == 75
    assert time.monotonic() - since < BUSY * (HANG_SECONDS + KILL_SECONDS)
    return drive


def blamed(drive: Drive, how: str, rank: int) -> None:
    """Check that rank, host, last step and age are named, and that the waiting stack is logged."""
    assert (drive.result["rank"], drive.result["host"]) == (rank, f"127.0.0.{2 + rank}")
    text = r"no progress for [3-9] s at step \d{2,}"
    text = rf"stopped by a signal: {text}" if how == "stopped" else rf"{text}, at .*:12 in .*"
    assert re.fullmatch(text, drive.result["cause"]), drive.result["cause"]
    assert f"rank {rank} on 127.0.0.{2 + rank}: " in drive.err.splitlines()[-1]
    assert f"rank {1 - rank} on" not in drive.err
    assert "in all_reduce" in drive.log(1 - rank, "err", host=1 - rank).read_text()
    assert not drive.alive()


@pytest.mark.parametrize(
    ("how", "rank"), [pytest.param("stopped", 0, marks=pytest.mark.long), ("stuck", 1)]
)
def test_of_ranks_that_wait_for_each_other_the_right_one_is_named(tmp_path, how, rank):
    """Ranks with gloo between them report now and then; one is stopped, or stuck in native code."""
    blamed(hung(tmp_path, how, rank, real=True), how, rank)


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_the_right_one_is_named_every_time(tmp_path, how):
    """Ten times each rank: who reported last is a matter of chance, who is named is not."""
    for turn in range(20):
        blamed(hung(tmp_path, how, turn % 2), how, turn % 2)


def test_a_stopped_rank_is_named(tmp_path):
    """SIGSTOP for a rank that never reports: it is named, and gone, though TERM cannot reach it."""
    drive = Drive(tmp_path, [sys.executable, "-c", "import time; time.sleep(98764)"], slots=[2])
    until(lambda: len([line for line in drive.alive().values() if "-c import time" in line]) == 2)
    os.kill(drive.pid("-c import time"), signal.SIGSTOP)
    assert drive.wait() == 75
    assert "stopped by a signal" in drive.result["cause"]
    assert not drive.alive()


def test_a_command_that_never_reports_has_no_hang_detection_and_that_is_said(tmp_path):
    """A rank without reports may be silent for much longer than the limit; one line says so."""
    drive = Drive(tmp_path, ["sleep", "2.5"], slots=[2], limits={"hang_seconds": 0.3})
    assert drive.wait() == 0
    (line,) = (line for line in drive.err.splitlines() if "hang" in line)
    assert line == (
        "rackrun: no hang detection: no report in 0 s; call report() of rackrun after each step,"
        " see docs/howto/own-script.md, or type --silent-minutes 30 if it prints more often"
    )


def test_ranks_that_never_report_beside_some_that_do_are_named(tmp_path):
    """Rank 0 reports, rank 1 and 2 do not: the line is about those."""
    code = "for step in range(1, 60): rank or report(step=step); time.sleep(0.1)"
    drive = Drive(tmp_path, python(code), slots=[3], limits={"hang_seconds": 1.0})
    assert drive.wait() == 0, drive.err
    line = next(line for line in drive.err.splitlines() if "no hang detection" in line)
    assert "no hang detection for rank 1-2: no report in 1 s; call report()" in line


def test_a_stall_is_reported_before_it_ends_the_run(tmp_path):
    """A third of the limit without progress is a line, and so is the next step."""
    code = (
        "for step in range(1, 10): report(step=step); time.sleep(0.1)\n"
        "time.sleep(2.5); report(step=10); time.sleep(0.3)\n"
    )
    drive = Drive(tmp_path, python(code), limits={"hang_seconds": 6.0})
    assert drive.wait() == 0, drive.err
    stall, again = (line for line in drive.err.splitlines() if "progress" in line)
    assert stall == (
        "rackrun: rank 0 on 127.0.0.2: no progress for 2 s at step 9; at 6 s the run ends"
    )
    assert again == "rackrun: all ranks make progress again"


def test_ranks_that_waited_for_one_that_saved_have_time_for_their_step(tmp_path):
    """One saves for longer than the limit of a step, which the others still have to end: 0."""
    code = (
        "report(step=1); time.sleep(0.1); report(step=2)\n"
        "if rank == 0: report(phase='save'); time.sleep(4); report(phase='train', step=2)\n"
        "else: time.sleep(4)\n"
        "time.sleep(1.5)\n"
        "report(step=3)\n"
    )
    drive = Drive(tmp_path, python(code), slots=[2], limits={"hang_seconds": 2.5})
    assert drive.wait() == 0, drive.err


def make_run(ranks: int, work: Work = Command(("x",))) -> RunState:  # noqa: B008
    job = Job(work, RunFolder(Path("/x")))
    plan = make_plan(job, [PlannedHost("a", "a", ranks, "python", "/", "/x")], 1)
    run = RunState(plan, 0.0)
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
    assert state_of(run, run.hosts[0], 100.0) == "lacks data"
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
    hang = find_hang(run, LIMITS, 3602)
    assert hang is not None


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
