"""`./run-ssh` on real sshd: what runs is what was planned, how it ends, and what is left."""

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import warm
from tests.lab.hosts import APART, BUSY, SHORT, WAIT, Sshd
from tests.lab.waiting import until

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


def test_what_dry_run_shows_is_what_runs(start_lab):
    """The plan of --dry-run --json is the plan of the run, but for its id, time and port."""
    lab = start_lab(2)
    args = (
        "--env",
        "A=b c",
        lab.cheap_hosts("slots=2 env=HERE=1", "slots=2"),
        "--",
        "true",
        "x y",
    )
    code, out, err = lab.result_of("--dry-run", "--json", *args)
    assert code == 0, err
    assert not (lab.folder / "runs").exists()
    code, _, err = lab.result_of(*args)
    assert code == 0, err
    ran = (lab.run_folder() / "plan.json").read_text()

    def bare(text: str) -> str:
        plan = json.loads(text)
        port = plan["hosts"][0]["torchrun"][7].partition("=")[2]
        folder = plan["hosts"][0]["folder"]
        for name in (plan["run_id"], port, folder):
            text = text.replace(name, "")
        return json.dumps(json.loads(text))

    assert bare(out) == bare(ran)
    plan = json.loads(ran)
    assert plan["world_size"] == 4
    assert ["A", "b c"] in plan["hosts"][1]["environment"]
    assert ["HERE", "1"] in plan["hosts"][0]["environment"]
    assert ["HERE", "1"] not in plan["hosts"][1]["environment"]


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


def test_secrets_and_paths_are_not_on_any_command_line_of_ssh(start_lab):
    """SSH-4: what sshd is asked to run is one fixed line, whatever the user runs."""
    lab = start_lab(1)
    hosts = lab.cheap_hosts("workdir='/tmp'")
    process = lab.run_ssh("--env", "TOKEN=s3cr3t", hosts, *WAIT)
    processes = lab.started(1)
    agents = [line for pid, line in processes.items() if "sys.stdin.buffer" in line]
    assert agents
    assert not [line for line in processes.values() if "s3cr3t" in line]
    assert {line.partition("\0-I")[2] for line in agents if "-I" in line} <= {
        line.partition("\0-I")[2] for line in agents[:1]
    } | {""}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_python_programs_launch_on_hosts_as_well(start_lab):
    """launch(..., hosts=...) takes the same options and returns the codes of all ranks."""
    lab = start_lab(2)
    hosts = lab.cheap_hosts()
    program = (
        "from rackrun.launcher import launch\n"
        "words = ('--', 'sh', '-c', 'test $RANK = 0 || sleep 3; exit $((3 * RANK))')\n"
        f"options = dict(hosts={hosts!r}, ssh_config={str(lab.config)!r}, plain=True)\n"
        "result = launch(*words, **options)\n"
        "assert result.exit_code == 3, result\n"
        "assert dict(result.codes) == {0: 0, 1: 3}, result\n"
        "assert result.hosts == {'127.0.0.2': 'clean', '127.0.0.3': 'clean'}\n"
    )
    output = warm.run("-c", program, start=warm.Launcher, cwd=lab.folder)
    assert output.returncode == 0, output.stderr


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


def test_neither_a_stubborn_rank_nor_the_exit_barrier_of_torchrun_is_waited_for(start_lab):
    """Real torchrun waits for a peer whose rank ignores TERM: both are gone after the grace."""
    lab = start_lab(2, APART)
    before = [set(host.processes()) for host in lab.hosts]
    code = (
        "import os, signal, time\n"
        "if os.environ['RANK'] == '0': print('done', flush=True); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(999)"
    )
    hosts = lab.write_hosts(f"python={sys.executable}")
    process = lab.run_ssh(*SHORT, str(hosts), "--", sys.executable, "-c", code)

    def launched(host: Sshd) -> list[str]:
        """Return the command lines of torchrun, of the shim if there is one, and of the rank."""
        return [
            line
            for line in host.processes().values()
            if "/agent.zip\0" in line or line.endswith("time.sleep(999)\0")
        ]

    until(lambda: len(launched(lab.hosts[1])) == 3, "the other rank runs", 60)
    until(lambda: any(lab.folder.glob("runs/2*/logs/*/*/rank-0.out")), "rank 0 is done", 60)
    until(lambda: len(launched(lab.hosts[0])) == 1, "only torchrun is left there", 60)
    process.terminate()
    told_at, bound = time.monotonic(), BUSY * (2.0 + 5.0)  # for a checkpoint, and the promise
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - told_at < bound, err
    assert process.returncode == 143, err
    assert lab.result()["codes"] == {"0": 0, "1": 137}
    assert set(lab.result()["hosts"].values()) == {"clean"}
    until(
        lambda: [set(host.processes()) for host in lab.hosts] == before,
        "all is gone",
        told_at + bound - time.monotonic(),
    )


# -- the command line ---------------------------------------------------------------------------


@pytest.mark.security("SSH-5")
def test_bad_lines_are_all_named_and_nothing_is_contacted(start_lab):
    """hosts.txt with faults: exit 64, a line for each, and sshd has not heard from us."""
    lab = start_lab(1)
    before = lab.hosts[0].log.count("Connection from")
    hosts = lab.folder / "bad.txt"
    hosts.write_text(f"{lab.hosts[0].line}\n-x\nb slots=0\n")
    code, out, err = lab.result_of(str(hosts), "--", "true")
    assert (code, out) == (64, "")
    assert f"{hosts}:2:1: " in err
    assert f"{hosts}:3:3: " in err
    assert lab.hosts[0].log.count("Connection from") == before


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


@pytest.mark.parametrize(
    ("args", "prog"),
    [(["check"], "rackrun check"), (["./run-ssh", "--check"], "./run-ssh --check")],
)
def test_check_has_a_help_of_its_own(args, prog):
    """Usage, examples and the hint below a mistake are those of `check`, not of `ssh`."""
    command = [sys.executable, "-m", "rackrun", *args]
    wide = {**os.environ, "COLUMNS": "120"}
    output = subprocess.run([*command, "--help"], env=wide, capture_output=True, text=True).stdout
    usage, _, about, *_ = output.splitlines()
    assert usage == f"usage: {prog} [options] HOSTS [TASK [task options]]"
    assert about.startswith("Check the hosts")
    examples = output.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert examples and all(line.startswith(f"  {prog} ") for line in examples)
    wrong = subprocess.run([*command, "--dee", "hosts.txt"], capture_output=True, text=True)
    assert wrong.returncode == 64 and wrong.stderr.endswith(f"type: {prog} --help\n")


# -- secrets and locks --------------------------------------------------------------------------


@pytest.mark.security("SSH-6")
def test_a_secret_reaches_the_ranks_and_nothing_else(start_lab):
    """SSH-6: in no plan, log, result or command line, here or there; but every rank has it."""
    lab = start_lab(2)
    secret = "canary-in-the-coal-mine"
    hosts = lab.cheap_hosts()
    check = f"import os; assert os.environ['TOKEN'] == {secret[::-1]!r}[::-1]; "
    command = ("--", sys.executable, "-c", check + "import time; time.sleep(999)")
    process = lab.run_ssh(*SHORT, "--secret", "TOKEN", hosts, *command, env={"TOKEN": secret})
    lines = lab.started(2)
    assert not [line for line in lines.values() if secret in line]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    code, plan, _ = lab.result_of(
        "--dry-run", "--json", "--secret", "TOKEN", hosts, *command, env={"TOKEN": secret}
    )
    assert code == 0
    assert secret not in out + err + plan
    for path in lab.folder.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path


def test_a_second_launch_is_refused_and_names_the_first(start_lab):
    """PROC-4: while a run holds a host, another exits 78 within 5 s; afterwards it may start."""
    lab = start_lab(2)
    hosts = lab.cheap_hosts()
    process = lab.run_ssh(*SHORT, hosts, *WAIT)
    lab.started(2)
    code, _, err = lab.result_of(hosts, "--", "true")
    assert code == 78
    assert "127.0.0.2" in err and "127.0.0.3" in err
    assert "in use by another run: run " in err and f" of {getpass.getuser()}, since " in err
    assert len(list((lab.folder / "runs").glob("2*"))) == 1
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    code, _, err = lab.result_of(hosts, "--", "true")
    assert code == 0, err


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


def test_runs_on_different_gpus_of_a_host_share_it(start_lab):
    """--include with slots: two runs on the GPUs 0 and 1 go together, a third on 1 does not."""
    lab = start_lab(1)
    hosts = lab.cheap_hosts("slots=2")
    first = lab.run_ssh(*SHORT, "--include", "127.0.0.2:0", hosts, *WAIT)
    lab.started(1)
    code, _, err = lab.result_of("--include", "127.0.0.2:1", hosts, "--", "true")
    assert code == 0, err
    for args in (("--include", "127.0.0.2:0,1"), ()):
        code, _, err = lab.result_of(*args, hosts, "--", "true")
        assert code == 78
        assert "in use by another run" in err
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
