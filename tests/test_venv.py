"""The environment that the start scripts make on first use."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pip
import pytest

from rackrun.cuda import BUILDS
from rackrun.launcher.files import found_torch, pip_settings, working_tree
from tests.lab import warm
from tests.lab.wheels import only_here

ROOT = Path(__file__).parents[1]
BASE = Path(sys._base_executable)
"""An interpreter without torch; that of the tests has one."""
PROGRAMS = ("found_torch.py", "pip_settings.py")
"""What launcher/venv.sh runs before anything is installed."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Copy the files that a start script needs, without an environment."""
    folder = tmp_path / "a clone"
    programs = folder / "launcher" / "files"
    programs.mkdir(parents=True)
    shutil.copy(ROOT / "launcher" / "venv.sh", folder / "launcher")
    for name in PROGRAMS:
        shutil.copy(ROOT / "launcher" / "files" / name, programs)
    (folder / "rackrun").mkdir()
    (folder / "rackrun" / "launcher").symlink_to("../launcher")
    shutil.copy(ROOT / "rackrun" / "cuda.py", folder / "rackrun")
    shutil.copy(ROOT / "run-local", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with pip alone, as `python3 -m venv` does; its pip is a link to ours."""
    folder = tmp_path_factory.mktemp("environment") / ".venv"
    subprocess.run([BASE, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    return folder


def small(clone: Path, digest: str = "", names: str = "setuptools|braceexpand") -> None:
    """Make the project of a clone one that needs next to nothing, with a lock of its own.

    Its one package is installed from a file of the real lock, or has another hash.
    """
    lock = (ROOT / "requirements" / "base.txt").read_text()
    kept = re.findall(rf"^(?:{names})==.*(?:\n    --hash.*)+(?:\n    # via.*)+", lock, re.MULTILINE)
    text = "\n".join(kept)
    (clone / "requirements" / "base.txt").write_text(HASH.sub(digest or r"\g<0>", text) + "\n")
    (clone / "launcher" / "__init__.py").touch()
    (clone / "rackrun" / "__main__.py").write_text(
        "import site; site.main(); import braceexpand; print('runs')\n"
    )
    (clone / "pyproject.toml").write_text(SMALL)


HASH = re.compile(r"(?<=sha256:)[0-9a-f]{64}")
SMALL = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "small"
version = "1"
dependencies = ["a-package-that-is-nowhere"]

[tool.setuptools.packages.find]
include = ["launcher*"]
"""


def interpreter(path: Path, body: str) -> Path:
    """Write an executable `python3` with the shell script `body`."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


WITH_UV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run_local(
    clone: Path, python: Path, environment: Mapping[str, str] = WITH_UV
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "run-local", "--help"],
        cwd=clone,
        env={**environment, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("", "sudo apt-get install python3 python3-venv"),  # there is no python3
        (f'case "$*" in *ensurepip*) exit 1;; esac\nexec "{BASE}" "$@"', "install python3-venv"),
        ('case "$*" in *version_info*) exit 1;; esac', "older than 3.11"),
    ],
)
def test_a_python_that_will_not_do_is_met_with_what_to_type(clone, tmp_path, script, says):
    """None, Debian's without its venv package, and an old one: 78, and nothing is made."""
    python = interpreter(tmp_path / "python3", script) if script else tmp_path / "absent"
    result = run_local(clone, python)
    assert (result.returncode, says in result.stderr.splitlines()[-1]) == (78, True), result.stderr
    assert not any(clone.glob(".venv/*"))


def test_an_environment_whose_interpreter_is_gone_is_made_anew(clone, tmp_path):
    """After an upgrade of Python the stamp is still right, but .venv/bin/python leads nowhere."""
    script = f'case "$*" in *"-m venv"*) echo anew >&2; exit 1;; esac\nexec {BASE} "$@"'
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to(tmp_path / "gone")
    text = (clone / "pyproject.toml").read_bytes()
    text += (clone / "requirements" / "base.txt").read_bytes()
    sums = subprocess.run(["cksum"], input=text, capture_output=True, check=True)
    (clone / ".venv" / "installed").write_bytes(f"{clone} ".encode() + sums.stdout.strip())
    result = run_local(clone, interpreter(tmp_path / "python3", script))
    assert result.returncode == 78
    assert "anew" in result.stderr


def test_only_what_the_lock_names_is_installed(clone):
    """Whatever an index serves: other bytes under the same version are refused, and so is a package
    without a hash; else the files of the lock are installed, the project is built with them, and no
    dependency is looked for. A change of the lock is followed at the next use."""
    small(clone, digest="0" * 64)
    other = run_local(clone, BASE)
    assert (other.returncode, other.stdout) == (78, "")
    assert "hash" in other.stderr.lower()
    assert not list((clone / ".venv").glob("lib/*/site-packages/braceexpand*"))
    small(clone)
    whole = run_local(clone, BASE)
    assert (whole.returncode, whole.stdout) == (0, "runs\n"), whole.stderr
    assert "installing" in whole.stderr
    assert run_local(clone, BASE).stderr == ""
    with (clone / "requirements" / "base.txt").open("a") as lock:
        lock.write("decorator==5.3.1\n")
    added = run_local(clone, BASE)
    assert (added.returncode, added.stdout) == (78, "")
    assert "installing" in added.stderr
    assert "hash" in added.stderr.lower() and "decorator" in added.stderr


def test_uv_installs_with_the_settings_of_pip(clone, bare, tmp_path):
    """A site that named its own index to pip gets no package from elsewhere, and none whose hash is
    not in the lock. Where pip asks a keyring, uv has to be told how."""
    shutil.copytree(bare, clone / ".venv", symlinks=True)
    index = tmp_path / "an index"
    index.mkdir()
    lock = only_here(index / "only-here")
    (index / "only-here" / "index.html").write_text(LINK)
    (clone / "pyproject.toml").unlink()  # as --sync brings it
    (clone / "rackrun" / "__main__.py").write_text("print('runs')\n")
    settings = f"[global]\nindex-url = {index.as_uri()}\n"
    (tmp_path / "pip.conf").write_text(f"{settings}keyring-provider = auto\n")
    environment = {
        "PATH": WITH_UV["PATH"],
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
    }
    (clone / "requirements" / "base.txt").write_text(HASH.sub("0" * 64, lock))
    asks = run_local(clone, BASE, environment)
    assert (asks.returncode, asks.stdout) == (78, "") and "UV_KEYRING_PROVIDER=" in asks.stderr
    (tmp_path / "pip.conf").write_text(settings)
    other = run_local(clone, BASE, environment)
    assert (other.returncode, other.stdout) == (78, "") and "hash" in other.stderr.lower()
    (clone / "requirements" / "base.txt").write_text(lock)
    done = run_local(clone, BASE, environment)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr
    (by,) = clone.glob(".venv/lib/*/site-packages/only_here-1.dist-info/INSTALLER")
    assert by.read_text().strip() == "uv"


LINK = '<a href="only_here-1-py3-none-any.whl">only_here-1-py3-none-any.whl</a>'


def test_settings_of_pip_reach_uv_by_its_environment(tmp_path, monkeypatch):
    """Whatever file, section or variable they come from; an index may hold a password."""
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        if name != "PIP_CONFIG_FILE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_PROXY", "http://proxy:3128")
    settings = pip_settings.pip_settings()
    assert pip_settings.for_uv(settings) == {
        "HTTPS_PROXY": "http://proxy:3128",
        "HTTP_PROXY": "http://proxy:3128",
        "SSL_CERT_FILE": "/etc/ssl/site.pem",
        "UV_DEFAULT_INDEX": "https://me:secret@mirror/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INSECURE_HOST": "mirror",
        "UV_NATIVE_TLS": "true",
        "UV_SYSTEM_CERTS": "true",
    }
    assert settings["no-index"] == "true"


PIP_CONF = """
[global]
index-url = https://wrong/simple
cert = /etc/ssl/site.pem
trusted-host = mirror
find-links = /wheels
    /more
[install]
index-url = https://me:secret@mirror/simple
extra-index-url = https://one/simple
    https://two/simple
no-index = true
"""


def test_settings_that_pip_cannot_read_are_its_own_to_explain(tmp_path):
    """pip names the file and the line; nothing is installed, and there is no traceback."""
    (tmp_path / "pip.conf").write_text("index-url = https://mirror/simple\n")
    done = subprocess.run(
        [sys.executable, "-P", pip_settings.__file__, "touch", tmp_path / "installed"],
        env={**os.environ, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and not (tmp_path / "installed").exists()
    assert f"file: '{tmp_path}/pip.conf', line: 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_old_gpus_get_the_lock_whose_torch_has_code_for_them(clone, bare, tmp_path):
    """A V100 is found on first use, and remembered; RACKRUN_LOCK takes another lock."""
    shutil.copytree(bare, clone / ".venv", symlinks=True)
    (clone / "requirements" / "cuda12.txt").write_text(only_here(clone / "wheels"))
    (clone / "requirements" / "base.txt").write_text("this is no lock\n")
    (clone / "pyproject.toml").unlink()  # as --sync brings it, with wheels
    (clone / "rackrun" / "__main__.py").write_text("print('runs')\n")
    smi = interpreter(tmp_path / "nvidia-smi", "echo '535.104.05, 7.0'; touch $0-was-asked")
    environment = {**WITH_UV, "PATH": f"{tmp_path}:{WITH_UV['PATH']}", "HOME": str(tmp_path)}
    done = run_local(clone, BASE, environment)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr
    assert (clone / ".venv" / "lock").read_text() == "cuda12\n"
    assert list(clone.glob(".venv/lib/*/site-packages/only_here-1.dist-info"))
    smi.with_name("nvidia-smi-was-asked").unlink()
    again = run_local(clone, BASE, environment)
    assert (again.stdout, again.stderr) == ("runs\n", "")
    assert not smi.with_name("nvidia-smi-was-asked").exists()
    other = run_local(clone, BASE, {**environment, "RACKRUN_LOCK": "base"})
    assert (other.returncode, other.stdout) == (78, "")
    assert "bring the wheels of requirements/base.txt: python3 -m pip download" in other.stderr
    assert not (clone / ".venv" / "installed").exists()  # parts of both locks may be there


@pytest.mark.parametrize("name", ["cuda10", "dev", "ray", "../requirements/base", "base cuda12"])
def test_only_the_locks_of_pytorch_can_be_asked_for(clone, name):
    """A file in requirements/ of another kind is refused like a name that does not exist."""
    done = run_local(clone, BASE, {**os.environ, "RACKRUN_LOCK": name})
    message = f"rackrun: RACKRUN_LOCK: no lock of PyTorch is called {name}; type base or cuda12\n"
    assert (done.returncode, done.stderr) == (78, message)
    assert not (clone / ".venv").exists()


def test_a_lock_that_can_be_asked_for_is_known_for_every_gpu():
    """The names in venv.sh, in the packages of an installed rackrun, and by GPU are the same."""
    names = sorted(build.lock for build in BUILDS if build.lock)
    assert f" {' | '.join(names)}) ;;" in (ROOT / "launcher" / "venv.sh").read_text()
    assert [f"{name}.txt" for name in names] == sorted(working_tree.LOCKS)


@pytest.mark.long  # 22 MB from the index
def test_where_there_is_no_uv_the_one_of_the_lock_is_brought_first(clone, tmp_path):
    """Then it installs the rest, or the environment of a project that has a uv.lock."""
    small(clone, names="setuptools|braceexpand|uv")
    (tmp_path / "python3").symlink_to(sys._base_executable)
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    rest = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = run_local(clone, tmp_path / "python3", {**rest, **variables})
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr
    (by,) = clone.glob(".venv/lib/*/site-packages/braceexpand-*.dist-info/INSTALLER")
    assert by.read_text().strip() == "uv"
    shutil.rmtree(clone / ".venv")
    own = tmp_path / "own project"
    own.mkdir()
    (own / "pyproject.toml").write_text('[project]\nname = "own"\nversion = "1"\n')
    subprocess.run([Path(sys.executable).with_name("uv"), "lock"], cwd=own, check=True)
    fill = ["bash", "-c", '. launcher/venv.sh; venv_project "$1"', "bash", own]
    variables["PYTHON"] = str(tmp_path / "python3")
    subprocess.run(fill, cwd=clone, env={**rest, **variables}, check=True)
    assert (own / ".venv" / "bin" / "python").exists()


def test_torch_that_is_there_already_is_used(clone, tmp_path):
    """The tests' own environment is active, as one of conda or an image would be: .venv uses its
    torch and installs what else the lock names, whatever constraints the image sets. Once it is
    gone, or RACKRUN_OWN_TORCH is set, the torch of the lock is wanted."""
    of_torch = "".join(
        f"{name}==1 --hash=sha256:{'0' * 64}\n" for name in ("numpy", "nvidia-cublas", "torch")
    )
    (clone / "requirements" / "base.txt").write_text(of_torch + only_here(clone / "wheels"))
    (clone / "pyproject.toml").unlink()  # as --sync brings it, with wheels
    (clone / "rackrun" / "__main__.py").write_text(WHERE_TORCH_IS)
    (tmp_path / "constraints").write_text("only-here==2\n")
    environment = {
        "PATH": WITH_UV["PATH"],
        "HOME": str(tmp_path),
        "PIP_CONSTRAINT": str(tmp_path / "constraints"),
    }
    path = sysconfig.get_path("purelib")
    used = run_local(clone, warm.interpreter(), environment)
    assert (used.returncode, used.stdout) == (0, f"{path}/torch/__init__.py 1\n"), used.stderr
    assert used.stderr.splitlines() == [
        f"rackrun: using torch {version('torch')} and torchvision {version('torchvision')}"
        f" of {path}",
        f"rackrun: installing the rest into {clone}/.venv;"
        " RACKRUN_OWN_TORCH=1 installs the torch of the lock",
    ]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "run-local").symlink_to(Path("..", clone.name, "run-local"))
    again = run_local(tmp_path / "bin", BASE, environment)  # called through a link, and current
    assert (again.stdout, again.stderr) == (used.stdout, "")
    (link,) = clone.glob(f".venv/lib/*/site-packages/{found_torch.LINK}")
    assert exit_code_of(clone, "RACKRUN_OWN_TORCH=1; venv_torch_is_there") == 1
    link.write_text("/gone\n")
    assert exit_code_of(clone, "venv_torch_is_there") == 1
    assert exit_code_of(clone, f"python=.venv/bin/python; locks=(); venv_finds_torch {BASE}") == 1
    assert not link.exists()
    assert exit_code_of(clone, "venv_torch_is_there") == 0


def test_a_command_of_ones_own_needs_no_more_than_a_torch(clone, tmp_path):
    """Where python3 has one, of any version, --sync installs nothing and asks no index; rackrun can
    be imported, and a task installs the rest later. Without a torch, the lock is installed."""
    (clone / "requirements" / "base.txt").write_text(only_here(tmp_path / "unreachable"))
    site = tmp_path / "site"
    for part in ("torch", "torch-1.13.dist-info"):
        (site / part).mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    (site / "torch-1.13.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.13\n")
    (clone / "rackrun" / "__init__.py").touch()
    environment = {**WITH_UV, "PIP_INDEX_URL": "http://127.0.0.1:1/", "PYTHON": str(BASE)}
    environment["RACKRUN_OWN_COMMAND"] = "1"
    args = ["bash", "-c", ". launcher/venv.sh; venv_python"]
    refused = subprocess.run(args, cwd=clone, env=environment, capture_output=True, text=True)
    assert refused.returncode == 78 and "the installation failed" in refused.stderr
    shutil.rmtree(clone / ".venv")
    variables = {**environment, "PYTHONPATH": str(site)}
    made = subprocess.run(args, cwd=clone, env=variables, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, f"rackrun: using torch 1.13 of {site}\n")
    asked = "import torch, rackrun; print(torch.__file__, rackrun.__file__)"
    python = [clone / ".venv" / "bin" / "python", "-P", "-c", asked]
    printed = subprocess.run(python, capture_output=True, text=True, check=True).stdout.split()
    assert printed == [f"{site}/torch/__init__.py", *f"{clone}/rackrun/__init__.py".split()]
    assert not (clone / ".venv" / "installed").exists()
    (site / "torch-1.13.dist-info" / "METADATA").unlink()
    old = interpreter(tmp_path / "old", 'case "$*" in *version_info*) exit 1; esac; exit 0')
    shutil.rmtree(clone / ".venv")
    kept = {**environment, "PYTHON": str(old)}
    assert subprocess.run(args, cwd=clone, env=kept, check=False).returncode == 0
    assert not (clone / ".venv" / "bin").exists()  # the ranks use python3


def exit_code_of(clone: Path, asked: str) -> int:
    """Run functions of venv.sh; return the exit code."""
    args = ["bash", "-c", f"set -euo pipefail; . launcher/venv.sh; {asked}"]
    return subprocess.run(args, cwd=clone, check=False).returncode


WHERE_TORCH_IS = """
import site
site.main()
from importlib.metadata import version
from importlib.util import find_spec
print(find_spec("torch").origin, version("only-here"))
"""


@pytest.mark.parametrize(
    "versions, why",
    [
        ({"torch": "2.9.1+cu130", "torchvision": "0.28"}, "torch 2.9.1+cu130 is older than 2.10"),
        ({"torch": "2.13.0a0+nv26"}, "there is no torchvision beside it"),
        ({"torch": "2.13.0a0+nv26", "torchvision": "0.24"}, "torchvision 0.24 is older than 0.25"),
        ({"torch": "2.14", "torchvision": "0.29"}, "imported: OSError: libcudart.so.13: no"),
        ({}, ""),
    ],
)
def test_a_torch_that_cannot_be_used_is_named(tmp_path, versions, why):
    """One that a module loads by PYTHONPATH and that is too old, alone or broken is left alone."""
    for name, number in versions.items():
        about = tmp_path / f"{name}-{number}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        (tmp_path / f"{name}.py").write_text("raise OSError('libcudart.so.13:\\nno such file')\n")
    done = subprocess.run(
        [BASE, "-P", ROOT / "launcher" / "files" / PROGRAMS[0], tmp_path / ".venv", "a-lock"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == bool(why)
    assert why in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_floors_of_what_is_found_are_those_of_the_project():
    """A host of --sync has no pyproject.toml to read them from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    train = project["project"]["optional-dependencies"]["train"]
    needs = [*project["build-system"]["requires"], *project["project"]["dependencies"], *train]
    assert dict(need.split(">=") for need in needs) == found_torch.FLOORS


def test_what_is_left_of_a_lock_needs_no_torch():
    """Of the project's own lock, with the tests' torch: neither torch nor a library of its build
    would be installed, and all that the project names besides would be."""
    lock = (ROOT / "requirements" / "base.txt").read_text()
    result = found_torch.needed_by(found_torch.SHARED, ROOT / ".no-venv")
    left = set(NAME.findall(found_torch.without(lock, result)))
    assert not left & {"torch", "torchvision", "triton", "numpy", "sympy", "nvidia-cublas"}
    assert left > found_torch.FLOORS.keys() - result.keys() | {"grpcio", "bcrypt"}
    assert set(NAME.findall(lock)) > left


NAME = re.compile(r"^([\w.-]+)==", re.MULTILINE)
