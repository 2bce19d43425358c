"""An end of a run that only a real torchrun can show: its exit barrier."""

import signal

from tests.lab import warm
from tests.lab.oracles import clean
from tests.lab.waiting import until

ALONE = """\
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
os._exit(0) if os.environ["RANK"] == "0" else print("alone", flush=True)
time.sleep(98764)
"""


def test_a_torchrun_in_its_exit_barrier_is_ended(start_lab):
    """One host is done and its torchrun waits for the other, deaf to SIGTERM: gone all the same."""
    lab = start_lab(2)
    (lab.folder / "alone.py").write_text(ALONE)
    hosts = lab.write_hosts(f"python={warm.interpreter()} workdir={lab.folder}")
    process = lab.run_ssh(str(hosts), "--", "python", "alone.py")
    logs = "runs/2*/logs/*/*/rank-1.out"
    until(lambda: any(path.read_text() for path in lab.folder.glob(logs)), "rank 0 is done", 60)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert lab.result()["codes"]["0"] == 0
    clean(lab)
