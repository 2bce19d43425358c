"""`./run-ssh` on real sshd: what runs is what was planned, how it ends, and what is left."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import warm
from tests.lab.hosts import BUSY, SHORT

# -- runs that end well -------------------------------------------------------------------------


def test_real_torchrun_makes_one_world_of_uneven_hosts(start_lab):
    """Node rank is the line, slots may differ, every rank's bytes arrive, sums are right."""
    lab = start_lab(2)
    python = f"python={warm.interpreter()}"
    hosts = lab.write_hosts(f"{python} slots=2", python)
    script = lab.folder / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "mine = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(mine)\n"
        "print(dist.get_rank(), os.environ['GROUP_RANK'], int(mine), flush=True)\n"
        "assert os.environ['WORLD_SIZE'] == os.environ['RACKRUN_WORLD_SIZE']\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)\n"
    )
    code, _, err = lab.result_of(str(hosts), "--", str(warm.interpreter()), str(script))
    assert code == 0, err
    nodes = {0: 0, 1: 0, 2: 1}
    for rank, node in nodes.items():
        log = lab.run_folder() / "logs" / f"127.0.0.{2 + node}" / "1" / f"rank-{rank}.out"
        assert log.read_text() == f"{rank} {node} 6\n"
    assert lab.result()["codes"] == {str(rank): 0 for rank in nodes}
    assert set(lab.result()["hosts"].values()) == {"clean"}


def test_hosts_and_slots_can_be_left_out(start_lab):
    """--include takes hosts and slots; a picked slot becomes the GPU that the rank may see."""
    lab = start_lab(3)
    hosts = lab.cheap_hosts("slots=4")
    show = ("--", "sh", "-c", "echo $RANK of $WORLD_SIZE sees $CUDA_VISIBLE_DEVICES")
    code, out, err = lab.result_of("--include", "127.0.0.4:3,1,127.0.0.2:0,2", hosts, *show)
    assert code == 0, err
    text = "".join(path.read_text() for path in lab.run_folder().glob("logs/*/*/*.out"))
    assert sorted(text.splitlines()) == [
        "0 of 4 sees 0,2",
        "1 of 4 sees 0,2",
        "2 of 4 sees 1,3",
        "3 of 4 sees 1,3",
    ]


# -- runs that end badly ------------------------------------------------------------------------


@pytest.mark.parametrize("always", [False, True])
def test_a_master_port_that_is_taken_in_between_is_changed_once(start_lab, always):
    """torchrun finds its port in use: the whole start is tried once more."""
    lab = start_lab(2)
    hosts = lab.cheap_hosts()
    python = Path(lab.folder / "python")
    text = python.read_text()
    first = f"{lab.folder}/first-attempt"
    name_it = f'id=$(echo "$*" | grep -o "rdzv-id=[0-9a-f]*"); ln -s "$id" {first} 2> /dev/null; '
    taken = "{ " if always else f'{name_it}test "$(readlink {first})" != "$id" || {{ '
    message = "echo 'RuntimeError: the server socket failed, name: EADDRINUSE' >&2; exit 1; }; "
    python.write_text(text.replace("shift 2; exec", f"{taken}{message}shift 2; exec"))
    code, _, err = lab.result_of(*SHORT, hosts, "--", "true")
    first, second = lab.result()["attempts"]
    assert "EADDRINUSE" in first["cause"]
    assert ("EADDRINUSE" in second["cause"]) == always
    assert code == (78 if always else 0), err


# -- the command line ---------------------------------------------------------------------------


def test_a_look_without_a_task_asks_for_no_data(start_lab):
    """--check is green on a fresh clone, and --dry-run shows the demo, which it does not make."""
    lab = start_lab(2)
    code, out, err = lab.result_of("--check", lab.cheap_hosts())
    assert (code, "shards" in out) == (0, False), err
    code, out, err = lab.result_of("--dry-run", lab.cheap_hosts())
    assert code == 0, err
    assert f"catdog --recipe demo --data {lab.folder}/data/demo/shards" in out
    assert not (lab.folder / "data").exists()


def test_help_is_there_at_once_without_fabric_or_torch():
    """./run-ssh --help imports neither, so it answers in a quarter of a second."""
    code = (
        "import sys\nfrom rackrun.__main__ import command\n"
        "try:\n    command(['ssh', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'fabric', 'paramiko', 'numpy'} & set(sys.modules)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "--accept-new" in output.stdout


# -- secrets and locks --------------------------------------------------------------------------


def test_of_launches_at_the_same_time_exactly_one_runs(start_lab):
    """PROC-4: of launches 0, 0.5, 2 and 5 s apart one runs; the others get 78 in 5 s, and why."""
    lab = start_lab(2)
    hosts = lab.cheap_hosts()
    end = lab.folder / "end"
    command = ("--", "sh", "-c", f"until test -e {end}; do sleep 0.1; done")
    processes, began, took = [], [], [0.0] * 5
    for offset in (0.0, 0.0, 0.5, 2.0, 5.0):
        time.sleep(max(0.0, offset - (time.monotonic() - began[0]) if began else 0.0))
        began.append(time.monotonic())
        args = ("--name", f"launch-{len(began)}", hosts, *command)
        processes.append(lab.run_ssh(*SHORT, *args))
    waiting = set(range(5))
    while len(waiting) > 1:
        for number in [number for number in waiting if processes[number].poll() is not None]:
            took[number] = time.monotonic() - began[number]
            waiting.remove(number)
        time.sleep(0.02)
    end.touch()
    outputs = [process.communicate()[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 78, 78, 78, 78], outputs
    winner = codes.index(0)
    assert winner < 3, "whoever comes when a run goes on is refused"
    for number in {0, 1, 2, 3, 4} - {winner}:
        assert took[number] < BUSY * 5.0
        observed = (
            "in use by another run" in outputs[number]
        )  # by the preflight, or later by its agent
        assert observed or "another run holds this host" in outputs[number]
    (folder,) = (lab.folder / "runs").glob(f"2*-launch-{winner + 1}")
    ended = json.loads((folder / "result.json").read_text())
    assert ended["verdict"] == "done"
    assert set(ended["hosts"].values()) == {"clean"}
