"""Clocks that differ from host to host, or are set in mid-run: only dates depend on them."""

import re
import sys
import time
from pathlib import Path

from tests.lab import warm
from tests.lab.hosts import ROOT, Lab
from tests.lab.waiting import until

SKEWED_RANKS = str(Path(__file__).with_name("skewed_ranks.py"))
ANOTHER_TIME = """\
import os, time
true = time.time
def another():
    with open(os.environ["SKEW"]) as file:
        return true() + float(file.read())
time.time, time.time_ns = another, lambda: int(another() * 1e9)
"""
HOUR = 3600


class Clocks:
    """Hosts, and a launcher, with clocks of their own: Python's, in files that say how wrong."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.folder = lab.folder / "clocks"
        self.folder.mkdir()
        (self.folder / "sitecustomize.py").write_text(ANOTHER_TIME)

    def set(self, name: str, seconds: float) -> dict[str, str]:
        """Set a clock; the environment of those who go by it."""
        partial = self.folder / f"{name}.partial"
        partial.write_text(str(seconds))
        partial.replace(self.folder / name)
        return {"PYTHONPATH": f"{self.folder}:{ROOT}", "SKEW": str(self.folder / name)}

    def python(self) -> Path:
        """Write an interpreter whose torchrun, which has done its imports, goes by that clock."""
        path = self.folder / "python"
        path.write_text(
            '#!/bin/sh\ncase "$1 $2" in -c*torch.distributed.run*)\n'
            f"code=\"exec(open('{self.folder}/sitecustomize.py').read()); $2\"\n"
            f'shift 2; exec {warm.interpreter()} -c "$code" "$@";;\nesac\n'
            f'exec {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return path

    def hosts(self, *skews: float) -> str:
        """Write hosts.txt with a clock for each host."""
        settings = []
        for number, skew in enumerate(skews):
            pairs = self.set(f"host-{number}", skew).items()
            environment = " ".join(f"env={name}={value}" for name, value in pairs)
            settings.append(f"python={self.python()} {environment}")
        return str(self.lab.write_hosts(*settings))

    def train(self, *skews: float, then: tuple[float, ...] = (), detach: bool = False) -> str:
        """Train two real ranks from end to end; set their clocks to other times halfway."""
        hosts = self.hosts(*skews)
        args = ("--", str(warm.interpreter()), SKEWED_RANKS, str(self.folder))
        environment = {**self.set("launcher", 0), "HOME": str(self.lab.folder)}
        args = (*["--detach"] * detach, hosts, *args)
        process = self.lab.run_ssh(*args, env=environment, before=("env",))  # with its clock
        until(lambda: all(p.exists() and p.read_text() for p in self.halfway), "both halfway", 60)
        observed = [float(path.read_text()) - time.time() for path in self.halfway]
        assert all(abs(one - skew) < 60 for one, skew in zip(observed, skews, strict=True))
        for number, skew in enumerate(then):
            self.set(f"host-{number}", skew)
            self.set("launcher", skew)
        (self.folder / "go").touch()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        if detach:
            code, out, err = self.lab.result_of(
                out.strip(), verb=("attach",), env=environment, before=("env",)
            )
            assert code == 0, err
        assert "rank 0 of 2" in out and "rank 1 of 2" in out
        return err

    @property
    def halfway(self) -> list[Path]:
        return [self.folder / f"halfway-{rank}" for rank in range(2)]


def test_clocks_that_differ_and_are_set_in_mid_run_harm_nothing(start_lab):
    """Real torchrun and gloo, one host an hour ahead; halfway the launcher's clock and a host's are
    set back by an hour, another one's is set an hour ahead: both ranks in one world, 0."""
    err = Clocks(start_lab(2)).train(0, HOUR, then=(HOUR, -HOUR))
    assert re.search(r"done in \d{1,2}:\d\d$", err), err  # not an hour
