"""`./run-ssh --slurm`: the hosts of a real allocation, over real sshd."""

import subprocess
from pathlib import Path

from tests.lab import warm

ROOT = Path(__file__).parents[2]
SAY = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def test_the_hosts_come_from_the_allocation(slurm, start_lab, tmp_path):
    """Inside salloc, without srun and without a host file: a rank on each of its nodes."""
    lab = start_lab(2)
    named = enumerate(lab.hosts, 1)
    lab.configure(*(f"Host n{n}\n  HostName {h.address}\n  Port {h.port}" for n, h in named))
    python = str(warm.interpreter())
    launch = [python, "-m", "rackrun", "./run-ssh", "--slurm"]
    launch += ["--ssh-config", str(lab.config), "--ignore-check", "machine"]
    launch += ["--python", python, "--", "python", "-c", SAY]
    output = subprocess.run(
        ["salloc", "--nodes=2", "--nodelist=n[1-2]", *launch],
        env={**slurm.environment, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.returncode == 0, output.stdout + output.stderr
    assert "n1:0 | rank 0 of 2" in output.stdout
    assert "n2:1 | rank 1 of 2" in output.stdout
