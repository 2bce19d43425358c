"""The true first cause among everything that goes wrong within a second."""

import pytest

from rackrun.launcher.run.events import AskedToStop, Lost, RankEnded, Stopping, TorchrunEnded
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision.hangs import Hang, Suspect
from rackrun.launcher.supervision.root_cause import (
    Cause,
    Failure,
    FailureLog,
    Tail,
    cause_of,
    find_root_failure,
)
from tests.unit.planned import plan_of


def find_root_cause(before: list[Failure], after: list[Failure], tail: Tail) -> Cause:
    return cause_of(find_root_failure(before, after, tail), tail)


GLOO = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 3, in <module>\n'
    "    loss.backward()\n"
    "RuntimeError: [../gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.2]:2\n"
)
NCCL = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 3, in <module>\n'
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.\n"
)
OWN = (
    "some warning\n"
    "Traceback (most recent call last):\n"
    '  File "train.py", line 9, in <module>\n'
    "    x = broken()\n"
    "        ^^^^^^^^\n"
    "ValueError: no such class\n"
    "[W socket.cpp:77] a last complaint\n"
)
PREFIXED = "".join(f"[rank12]: {line}\n" for line in GLOO.splitlines())
PLACED = f"{OWN}error: /home/me/net.py:7 in forward: ValueError: no such class\n"
CUDA = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 9, in <module>\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
)
ABORTED = (
    "terminate called without an active exception\nFatal Python error: Aborted\n\n"
    "Thread 0x00007f (most recent call first):\n  <no Python frame>\n"
)
CRASH = (
    "Fatal Python error: Segmentation fault\n\n"
    "Current thread 0x00007f (most recent call first):\n"
    '  File "model.py", line 12 in forward\n'
    '  File "train.py", line 9 in <module>\n'
)


def tails(**texts: str):
    return lambda node, rank, stream: texts.get(f"rank{rank}", "") if stream == "err" else ""


def test_the_first_failure_is_the_cause():
    """Two ranks fail by themselves: the one whose end arrives first is named."""
    cause = find_root_cause([RankEnded(0, 1, 7), RankEnded(1, 2, 8)], [], tails())
    assert (cause.rank, cause.node, cause.exit_code) == (1, 0, 7)
    cause = find_root_cause([RankEnded(0, 1, 7)], [RankEnded(1, 2, 8)], tails())
    assert cause.rank == 1, "not one that fails after the order to end"


def test_a_log_of_one_line_is_the_reason():
    """As of an interpreter that finds no script; a longer log is left to its reader."""
    line = "python: can't open file '/nothere.py': [Errno 2] No such file or directory"
    cause = find_root_cause([RankEnded(0, 0, 2)], [], tails(rank0=f"{line}\n"))
    assert (cause.text, cause.exit_code) == (f"exit code 2: {line}", 2)
    cause = find_root_cause([RankEnded(0, 0, 2)], [], tails(rank0=f"{line}\n{line}\n"))
    assert cause.text == "exit code 2"


@pytest.mark.parametrize(
    "line",
    [
        "train.py: error: the following arguments are required: --local_rank",
        "Error: No such option: --epoch Did you mean --epochs?",
    ],
)
def test_words_that_a_script_does_not_take_are_the_reason(line):
    """A log that ends as argparse and click end it; what is said of a count of errors is not."""
    cause = find_root_cause([RankEnded(0, 0, 2)], [], tails(rank0=f"usage: it\n{line}\n"))
    assert cause.text == f"exit code 2: {line}"
    cause = find_root_cause([RankEnded(0, 0, 2)], [], tails(rank0=f"{line}\n3 tests\n"))
    assert cause.text == "exit code 2"


def test_a_script_that_starts_processes_as_it_is_imported_is_told_where_to():
    """The exception that ends the rank says only that a worker has ended."""
    guard = "RuntimeError: \n  if __name__ == '__main__':\n      freeze_support()\n"
    ended = "RuntimeError: DataLoader worker (pid 7) exited unexpectedly\n"
    trace = f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n{ended}'
    cause = find_root_cause([RankEnded(0, 0, 1)], [], tails(rank0=guard + trace))
    assert cause.text == ended.strip()
    assert "__main__" in cause.advice


@pytest.mark.parametrize("noise", [GLOO, NCCL, PREFIXED, GLOO + ABORTED])
def test_a_broken_connection_is_a_secondary_failure(noise):
    """Peers notice a dead rank before its host reports: one without a network error is named."""
    end = (0, 6) if ABORTED in noise else (1,)
    troubles = [RankEnded(0, 0, *end), RankEnded(0, 1, *end), RankEnded(1, 2, 0, 9)]
    cause = find_root_cause(troubles, [], tails(rank0=noise, rank1=noise))
    assert (cause.rank, cause.exit_code, cause.text) == (2, 137, "killed by SIGKILL")


def test_only_broken_connections_leave_the_first_of_them():
    """When every rank blames the network, the first one to do so is named."""
    troubles = [RankEnded(0, 3, 1), RankEnded(0, 1, 1)]
    assert find_root_cause(troubles, [], tails(rank3=GLOO, rank1=GLOO)).rank == 3


def test_a_connection_that_breaks_between_healthy_hosts_may_hold_next_time():
    """A firewall's reset, or an MTU: 75, and not the 70 or 1 of the rank; not for other servers."""
    for tail, code in ((GLOO, 75), (OWN.replace("no such class", "Connection refused"), 70)):
        log = FailureLog(RunState(plan_of("a", "b"), 0.0), tails(rank0=tail, rank1=tail))
        for rank in (0, 1):
            log.take(RankEnded(rank, rank, 70), after_end=False)
        cause = log.root_cause()
        assert cause.exit_code == code
        assert ("a connection between ranks broke" in cause.text) == (code == 75)


def test_a_host_that_is_lost_explains_its_peers():
    """Ranks of other hosts complain at once, the lost host is known only after its lease."""
    lost = Lost(1, "silent for 15 s")
    cause = find_root_cause([RankEnded(0, 0, 1)], [lost], tails(rank0=GLOO))
    assert (cause.node, cause.exit_code, cause.text) == (1, 75, "silent for 15 s")


def test_a_rank_that_was_slow_to_die_is_the_cause():
    """It printed its exception, then took its time, and got our SIGTERM: code 1, its exception."""
    late = RankEnded(1, 5, 0, 15, ordered=True)
    cause = find_root_cause([RankEnded(0, 0, 1)], [late], tails(rank0=GLOO, rank5=OWN))
    assert (cause.rank, cause.exit_code, cause.text) == (5, 1, "ValueError: no such class")


@pytest.mark.parametrize("end", [(0, 9), (0, 11), (7, 0)])
def test_late_news_names_the_rank_that_had_no_order_to_end(end):
    """Rank 2 died first, without a word; peers, and then our order to stop, were sooner."""
    late = [RankEnded(0, 1, 0, 15, ordered=True), RankEnded(1, 2, *end)]
    cause = find_root_cause([RankEnded(0, 0, 1)], late, tails(rank0=GLOO))
    assert (cause.rank, cause.exit_code) == (2, late[1].exit_code)


def test_a_rank_with_an_order_to_end_is_not_the_cause():
    """However it ends then: by our signal, a code of its own, or with its connection gone."""
    late = [
        RankEnded(1, n, *end, ordered=True) for n, end in ((1, (0, 15)), (2, (3, 0)), (3, (1, 0)))
    ]
    cause = find_root_cause([RankEnded(0, 0, 1)], late, tails(rank0=GLOO, rank3=GLOO))
    assert (cause.rank, cause.exit_code) == (0, 1)


@pytest.mark.parametrize(("report", "node"), [(False, 1), (True, 0)])
def test_torchrun_killed_on_a_slow_host(report, node):
    """It was gone before any order to end, or ended with the rest."""
    late = TorchrunEnded(1, 0, 9, ordered=report)
    assert find_root_cause([RankEnded(0, 0, 1)], [late], tails(rank0=GLOO)).node == node


WAITING = (
    "Fatal Python error: Aborted\n\nCurrent thread 0x7f (most recent call first):\n"
    '  File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce\n'
)
SPINNING = WAITING.replace("/x/torch/distributed/distributed_c10d.py", "/x/model.py")


def test_a_rank_whose_connection_broke_does_not_hang():
    """It died of its neighbor's end a moment before it could write where it was: it waited."""
    suspects = tuple(Suspect(0, n, 7, f"no progress of rank {n}") for n in range(3))
    hang = Hang(None, None, "no progress of 3 ranks", suspects)
    args = tails(rank0=GLOO, rank1=WAITING, rank2=SPINNING)
    cause = find_root_cause([hang], [], args)
    assert (cause.rank, "model.py:3" in cause.text) == (2, True)


def test_the_traceback_ends_with_its_exception():
    """What the end of the run shows of a long log is the traceback alone."""
    cause = find_root_cause([RankEnded(0, 0, 1)], [], tails(rank0=OWN))
    assert cause.traceback.startswith("Traceback (most recent call last):")
    assert cause.traceback.endswith("ValueError: no such class")
    assert "warning" not in cause.traceback


@pytest.mark.parametrize(
    ("trouble", "tail", "text", "code", "advice"),
    [
        (RankEnded(0, 0, 0, 9), "", "killed by SIGKILL", 137, "kernel log"),
        (RankEnded(0, 0, 0, 9, oom=True), OWN, "out of memory", 137, "--batch-size"),
        (RankEnded(0, 0, 0, 11), CRASH, "SIGSEGV at model.py:12 in forward", 139, ""),
        (RankEnded(0, 0, 0, 40), "", "killed by signal 40", 168, ""),
        (RankEnded(0, 0, 1), CUDA, "CUDA out of memory", 1, "--batch-size"),
        (RankEnded(0, 0, 0, 6), OWN + ABORTED, "ValueError: no such class", 1, ""),
        (RankEnded(0, 0, 0, 6), ABORTED + OWN, "killed by SIGABRT", 134, ""),
        (RankEnded(0, 0, 0, 6), ABORTED, "killed by SIGABRT", 134, ""),
        (RankEnded(0, 0, 1), PLACED, "/home/me/net.py:7 in forward: ValueError: no such", 1, ""),
        (RankEnded(0, 0, 65), "error: shard 3: wrong digest\n", "shard 3: wrong digest", 65, ""),
        (TorchrunEnded(0, 0, 9), "", "torchrun was killed by SIGKILL", 75, "again"),
        (TorchrunEnded(0, 0, 9, oom=True), "", "the host is out of memory", 75, "--batch-size"),
        (TorchrunEnded(0, 1), "No module named torch\n", "No module named torch", 78, ""),
        (AskedToStop(0, 1, 15), "", "SIGTERM", 75, "again"),
        (Stopping(0, "the agent got SIGTERM"), "", "the agent got SIGTERM", 75, "again"),
        (Lost(0, "host key changed", 77), "", "host key changed", 77, ""),
        (Hang(0, 3, "no progress for 61 s at step 7"), "", "at step 7", 75, "again"),
    ],
)
def test_every_trouble_has_words_a_code_and_advice(trouble, tail, text, code, advice):
    """The table of exit codes, one row each."""
    cause = find_root_cause([trouble], [], lambda node, rank, stream: tail)
    assert text in cause.text
    assert cause.exit_code == code
    assert advice in cause.advice
