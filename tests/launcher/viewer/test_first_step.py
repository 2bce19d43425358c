"""`--detach` returns 0 only for a run that has begun: every rank has taken a step."""

import json
import signal
import sys

from tests.lab.detached import WAIT
from tests.lab.waiting import until

STEP = """\
import json, os, pathlib, socket, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(os.environ["RACKRUN_RUN_FOLDER"])
ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ear.connect(os.environ["RACKRUN_REPORTS"])
for step in (0, 1):
    while rank == 2 and step and not (folder / "go").exists():
        time.sleep(0.05)
    ear.send(json.dumps({"rank": rank, "phase": "train", "step": step}).encode())
    print("step", step, flush=True)
time.sleep(999)
"""


def starting(detached, seconds, *command):
    typed = detached.start_detached(seconds, detached.hosts, "--", *command)
    detached.run = typed.first_line()
    return typed


def test_it_waits_for_the_first_step_of_the_last_rank(detached):
    """Two ranks have taken one and the third has not: it waits; then it returns 0."""
    typed = starting(detached, "999", sys.executable, "-c", STEP)
    until(lambda: steps(detached) == [1, 1, 0], "two have taken a step", 60)
    assert typed.process.poll() is None
    (folder,) = (detached.work / "runs").glob("2*")
    (folder / "go").touch()
    code, _, err = typed.wait_for_end()
    assert code == 0, err
    see, end = (f"./run-ssh {verb} {detached.run}" for verb in ("attach", "stop"))
    assert f"detached; to see it: {see}; to end it: {end}" in err


def steps(detached):
    """Return the newest step of every host, as the run folder has it."""
    live = detached.folder / "state.json"
    hosts = json.loads(live.read_text())["hosts"] if live.exists() else []
    return [host["step"] for host in sorted(hosts, key=lambda host: host["node"])]


def test_what_ends_the_run_before_is_shown_with_its_code(detached):
    """The cause, rank and host, the run's exit code, and nothing is left."""
    fails = "import os, sys; sys.exit('error: no data' if os.environ['RANK'] == '1' else 0)"
    code, _, err = starting(detached, "30", sys.executable, "-c", fails).wait_for_end()
    assert code == 1, err
    assert "rackrun: failed: rank 1 on 127.0.0.3: no data" in err
    assert f"its output: ./run-ssh logs {detached.run}" in err
    detached.wait_until_clean()


def test_ctrl_c_ends_only_the_wait(detached):
    """130, the run goes on, and two commands are named."""
    typed = starting(detached, "999", sys.executable, "-c", WAIT)
    detached.wait_for_ranks(3)
    typed.process.send_signal(signal.SIGINT)
    code, _, err = typed.wait_for_end()
    assert code == 130, err
    assert (
        f"not waiting any longer; the run continues; to see it: ./run-ssh attach {detached.run}"
        in err
    )
    detached.wait_for_states("running", "running", "running")
    assert detached.result_of("stop", "--force")[0] == 0
