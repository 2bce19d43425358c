"""A clone as a user has it after an hour: hosts, images, a first run; commands are typed in it."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.lab import warm, warm_shell
from tests.lab.hosts import Lab

ROOT = Path(__file__).parents[2]
NOT_CLONED = shutil.ignore_patterns(
    *(".git", ".venv*", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "*.egg-info")
)
MADE_HERE = {"data", "runs", "build"}  # at the top; packages have folders of these names
HOSTS = 4

SSH_CONFIG = """\
Host gpu0{number}
  HostName {host.address}
  Port {host.port}
"""


def not_cloned(path: str, names: list[str]) -> set[str]:
    """Return what of a folder git would not clone."""
    return NOT_CLONED(path, names) | (MADE_HERE if Path(path) == ROOT else set())


class Clone:
    """The folder of a clone, a home, four hosts over real sshd, and an environment that is warm."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.elsewhere = (
            folder / name for name in ("clone", "home", "elsewhere")
        )
        for path in (self.home, self.elsewhere):
            path.mkdir()
        shutil.copytree(ROOT, self.folder, ignore=not_cloned, symlinks=True)
        (folder / "lab").mkdir()
        self.lab = Lab(folder / "lab").ready(HOSTS)
        self.install()
        self.configure_ssh()
        self.commit()

    def install(self) -> None:
        """Make .venv, up to date for ./run-local, of an interpreter that has imported torch."""
        programs = self.folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        warm_shell.write_client(programs / "python", warm.shell(), str(self.folder))
        (programs / "rackrun").write_text(
            f"#!{programs / 'python'}\nfrom rackrun.__main__ import command\n"
            "if __name__ == '__main__':\n    command()\n"
        )
        (programs / "rackrun").chmod(0o755)
        (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
        for extra in ("", "-ray"):  # as launcher/venv.sh stamps what is installed
            locks = f"requirements/base.txt {extra and 'requirements/ray.txt'}"
            stamp = (
                f'printf %s "$PWD $(cat pyproject.toml {locks} | cksum)" >.venv/installed{extra}'
            )
            subprocess.run(["bash", "-c", stamp], cwd=self.folder, check=True)

    def configure_ssh(self) -> None:
        """Give the hosts the names of the documentation, and the client its key."""
        named = [
            SSH_CONFIG.format(number=number, host=host)
            for number, host in enumerate(self.lab.hosts, 1)
        ]
        self.lab.configure(*named)
        (self.home / ".ssh").mkdir()
        shutil.copy(self.lab.config, self.home / ".ssh" / "config")
        (self.folder / "hosts.txt").write_text("gpu[01-02]\n")

    def commit(self) -> None:
        """Let git track what is there, as in any clone."""
        git = ("git", "-c", "user.name=test", "-c", "user.email=test", "-C", self.folder)
        for args in (("init", "-q"), ("add", "--all"), ("commit", "-q", "-m", "A clone")):
            subprocess.run([*git, *args], check=True, stdout=subprocess.DEVNULL)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder / '.venv' / 'bin'}:{os.environ['PATH']}",
            "HOME": os.fspath(self.home),
            "USER": os.environ.get("USER", "root"),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKEN": "s3cret",
        }

    def typed(self, line: str, until: str = "") -> tuple[int, str]:
        """Type a line, and Ctrl-C once `until` is printed; return the exit code and the output."""
        printed = ""
        with subprocess.Popen(
            ["bash", "-c", f"exec 2>&1\n{line}"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as shell:
            assert shell.stdout
            for text in shell.stdout:
                printed += text
                if until and until in text:
                    os.killpg(shell.pid, signal.SIGINT)
                    until = ""
        return shell.returncode, printed

    def close(self) -> None:
        self.lab.stop()
