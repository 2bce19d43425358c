"""The code that ranks run: the files of a working tree by content, and what --sync adds to them."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from rackrun.contract import variables
from rackrun.contract.tasks import PLATFORM, TASKS
from rackrun.cuda import BASE
from rackrun.errors import UsageError
from rackrun.launcher.remote.files import INSTALLED, file_digest
from rackrun.launcher.remote.processes import names_in
from rackrun.launcher.remote.upload import INCOMING
from rackrun.terminal import one_line
from rackrun.units import data_size, first_few

LARGE_BYTES = 1_000_000_000  # seconds to read, on every host
NAMED = 3  # of many files
LOCKS = ("base.txt", "cuda12.txt")  # links in launcher/, so that an installed rackrun has them
LISTING = ("-c", "core.fsmonitor=false", "ls-files", "-z", "-t", "--cached", "--others")
"""Prints for every file a letter, a blank and the path; the letter of an untracked one is `?`."""
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""What git sets for its hooks; it names the repository of the hook, which may be another one."""

PRIVATE_NAMES = (
    *(".env", ".env.*", "*.env", ".envrc", "*.env.local", "env.local", "env.production"),
    *(".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf", ".boto", ".s3cfg", ".rclone*"),
    *("rclone.conf", ".git-credentials", ".dockercfg", ".htpasswd", "*htpasswd", ".vault-token"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.p8", "*.p12"),
    *("*.pfx", "*.pkcs12", "*.jks", "*.keystore", "*.ppk", "*.kdb", "*.kdbx", "*.asc", "*.gpg"),
    *("*.ovpn", "*.tfvars", "*.tfstate", "*.tfstate.*", "kubeconfig*", "*.kubeconfig", "*.keytab"),
    *("kube.config", "admin.conf", "wallet.dat"),
    *("kaggle.json", "service-account*", "service_account*", "serviceaccount*", "client_secret*"),
    *("*credential*", "*password*", "*passwd*", "*private_key*", "*private-key*", "*privatekey*"),
    *("secret", "secrets", "secret.*", "secrets.*", "token", "*.token", "authorized_keys*"),
    *(".ssh", ".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".kube", ".kaggle", ".modal.toml"),
    *(".databrickscfg", ".huggingface", ".wandb_api_key", "*accesskeys*", "*access_key*"),
)
"""Names of files and folders that look private; see also `_SECRET_WORD`."""
_NO_GIT = "git is not installed here; type: sudo apt-get install git"
_UNKNOWN = "git does not know this folder; type: git init"
_SECRET_WORD = re.compile(
    r"(.*[._-])?(o?auth|bearer|cookies?|jwt|vault|secrets?|token|api[._-]?keys?|(?<=[._-])(key|pat))"
    r"(\.(cfg|conf|ini|json|toml|txt|ya?ml))?"
)
"""The last word of a name that holds nothing else: hf_token, token.json, wandb-api-key.txt."""


@dataclass(frozen=True)
class WorkingTree:
    """Tracked files of a folder, with their content at one moment."""

    root: Path
    files: Mapping[str, str]
    """Path below the root -> SHA-256, as `probe.file_digest` makes it."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """Path -> the mode that a file is to have elsewhere; links have none."""
    untracked: tuple[str, ...] = ()
    """What git neither tracks nor ignores, unread."""
    sources: Mapping[str, Path] = field(default_factory=dict)
    """Path -> the file here, for what is not below the root: an installed rackrun."""

    def source(self, path: str) -> Path:
        """Return where a file of the code is here."""
        return self.sources.get(path, self.root / path)


def working_tree(
    folder: Path,
    say: Callable[[str], object],
    own_files: Sequence[Path] = (),
    runs: Path | None = None,
) -> WorkingTree | None:
    """Return the code in a folder; None when git does not know it: then nothing is compared.

    What the launcher itself reads and writes is left out: `own_files`, the folder of `runs`, and
    the file of its output. `say` gets what a user may want to change. Raises UsageError for a file
    that cannot be read.
    """
    listed, why = _listing(folder)
    if listed is None:
        is_in_one = any((parent / ".git").exists() for parent in (folder, *folder.parents))
        if why != _UNKNOWN and (is_in_one or why != _NO_GIT):
            say(f"warning: the hosts' code is not compared with this folder: {why}")
        return None
    ours: tuple[str, ...] = (INCOMING, f"{INSTALLED}/")
    if runs:  # of a folder elsewhere, this begins with ../ and excludes nothing
        ours += (f"{os.path.relpath(runs.resolve(), folder.resolve())}/",)
    # by identity: our own output may go to a file of this folder, as with `> train.log`
    streams = (Path(f"/proc/self/fd/{number}") for number in (0, 1, 2))
    excluded_ids = {file_id for file in (*streams, *own_files) if (file_id := _identity(file))}
    tracked, others = (
        [
            path
            for path in paths
            if not path.startswith(ours) and _identity(folder / path) not in excluded_ids
        ]
        for paths in listed
    )
    if unnamed := [path for path in (*tracked, *others) if not _is_utf8(path)]:
        say(f"warning: left out: {_some_of(unnamed)}: a name that is not UTF-8")
        tracked, others = (list(filter(_is_utf8, paths)) for paths in (tracked, others))
    return with_files(WorkingTree(folder, {}, untracked=tuple(others)), tracked, say)


def _is_utf8(path: str) -> bool:
    return os.fsencode(path).decode(errors="replace") == path


def why_no_code() -> str:
    """Return why there is no working tree here, and what to type."""
    return _listing(Path.cwd())[1]


def _listing(folder: Path) -> tuple[tuple[list[str], list[str]] | None, str]:
    """Return the tracked and the untracked files; or None, and why git lists nothing."""
    command = ["git", "-C", os.fspath(folder), *LISTING, "--exclude-standard"]
    try:
        environment = {name: os.environ[name] for name in os.environ if name not in OF_A_HOOK}
        environment["LC_ALL"] = "C"
        listed = subprocess.run(command, capture_output=True, check=False, env=environment)
    except FileNotFoundError:
        return None, _NO_GIT
    if listed.returncode:
        complaint = listed.stderr.decode(errors="replace").strip().splitlines()
        if not complaint or "not a git repository" in complaint[0]:
            return None, _UNKNOWN
        remedy = next((line.strip() for line in complaint if "safe.directory" in line), "")
        hint = f"; type: {remedy}" if remedy else ""
        return None, one_line(f"git: {complaint[0].removeprefix('fatal: ')}{hint}")
    lines = [line.split(" ", 1) for line in os.fsdecode(listed.stdout).split("\0") if line]
    tracked = dict.fromkeys(path for tag, path in lines if tag != "?")  # unmerged ones come thrice
    others = [path for tag, path in lines if tag == "?"]
    for submodule in [path for path in tracked if _is_repository(folder / path)]:
        inside, why = _listing(folder / submodule)
        if inside is None:
            return None, why
        del tracked[submodule]
        tracked.update((f"{submodule}/{path}", None) for path in inside[0])
        others += [f"{submodule}/{path}" for path in inside[1]]
    return (list(tracked), others), ""


def _is_repository(path: Path) -> bool:
    return (path / ".git").exists() and not path.is_symlink()


def with_files(
    code: WorkingTree, paths: Sequence[str], say: Callable[[str], object]
) -> WorkingTree:
    """Return the code and these files of its folder, read now; links into nothing are none."""
    try:
        for remark in remarks_on(code.root, paths):
            say(f"warning: {remark}")
        digests = {path: file_digest(os.fspath(code.root / path)) for path in paths}
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise UsageError(f"{reason}; add what the ranks do not need to .gitignore") from error
    present = {path: digest for path, digest in digests.items() if digest}
    modes = {path: mode for path in present if (mode := _mode_elsewhere(code.root, path))}
    return replace(code, files={**code.files, **present}, modes={**code.modes, **modes})


def with_untracked(
    code: WorkingTree, asked: Sequence[str], say: Callable[[str], object]
) -> WorkingTree:
    """Return the code and what git does not track of the folder, private files only if `asked` for.

    `asked` are names and patterns; raises UsageError for one that no file has. `say` gets what is
    left out, and what to type: private files, and those that a program is writing, such as the log
    of `| tee train.log`: hosts could not be given the same bytes.
    """
    for name in asked:
        if not any(_matches(path, [name]) for path in code.untracked):
            raise UsageError(f"--sync-untracked {name}: no such untracked file")
    rest = [path for path in code.untracked if not _matches(path, asked)]
    written = _being_written() if rest else set()
    growing = [path for path in rest if _identity(code.root / path) in written]
    private = [path for path in rest if path not in growing and _is_private(code.root, path)]
    if growing:
        say(f"left out: {_some_of(growing)}: a program is writing it; add it to .gitignore")
    if private:
        hint = f"to copy one, type --sync-untracked {shlex.quote(private[0])}"
        say(f"left out: {_some_of(private)}: private, and not tracked by git; {hint}")
    left_out = {*growing, *private}
    return with_files(code, [path for path in code.untracked if path not in left_out], say)


def _matches(path: str, names: Iterable[str]) -> bool:
    # the file itself, or a folder around it
    return any(fnmatchcase(part, name.rstrip("/")) for part in _levels(path) for name in names)


def _is_private(folder: Path, path: str) -> bool:
    parts = [part.lower() for part in PurePosixPath(path).parts]
    named = any(fnmatchcase(part, name) for part in parts for name in PRIVATE_NAMES)
    return named or bool(_SECRET_WORD.fullmatch(parts[-1])) or _is_closed(folder, path)


def _is_closed(folder: Path, path: str) -> bool:
    # only its owner can read it, by its own mode or a folder's
    return any(not _mode(folder / part) & 0o077 for part in _levels(path))


def _levels(path: str) -> list[str]:
    parts = PurePosixPath(path).parts
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _mode(file: Path) -> int:
    try:
        return file.lstat().st_mode
    except OSError:  # it was just removed: no secret
        return stat.S_IFLNK | 0o777


def _mode_elsewhere(folder: Path, path: str) -> int:
    mode = _mode(folder / path)
    if not stat.S_ISREG(mode):
        return 0  # a link has no mode of its own
    # others may do no more there than here, where a closed folder keeps them out
    return (mode & 0o700 if _is_closed(folder, path) else mode & 0o755) | 0o600


def _being_written() -> set[tuple[int, int]]:
    # files that programs of this account have open for writing; none where there is no /proc
    written = set()
    folders = [process / "fd" for process in Path("/proc").glob("[0-9]*")]
    for descriptor in (folder / name for folder in folders for name in names_in(str(folder))):
        with suppress(OSError):  # it has just been closed
            if descriptor.lstat().st_mode & stat.S_IWUSR and (file := _identity(descriptor)):
                written.add(file)
    return written


def _identity(file: Path) -> tuple[int, int] | None:
    # which regular file it is, under any name and behind any link
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def with_installed(code: WorkingTree) -> WorkingTree:
    """Return the code and, where it is not rackrun's own repository, the installed packages."""
    ours = Path(__file__).parents[2]
    if code.root.resolve() == ours.parent.resolve():
        return code
    # In a checkout the packages are links in rackrun/, and are not found from there.
    files = [
        file for package in (".", *PLATFORM, *TASKS) for file in sorted((ours / package).rglob("*"))
    ]
    sources = {
        str(file.relative_to(ours.parent)): file
        for file in files
        if file.is_file() and "__pycache__" not in file.parts and file.name not in LOCKS
    }
    locks = {f"requirements/{name}": _lock(ours, name) for name in LOCKS}
    return _beside(code, {**sources, **locks})


def _lock(ours: Path, name: str) -> Path:
    """Return a lock; where --on has copied rackrun, it is beside the package."""
    path = (ours / "launcher" / name).resolve()
    return path if path.exists() else ours.parent / "requirements" / name


def with_wheels(code: WorkingTree, folder: Path) -> WorkingTree:
    """Return the code and the wheels of a folder, from which venv.sh then installs.

    Raises UsageError where the folder holds none.
    """
    wheels = {f"wheels/{path.name}": path for path in sorted(folder.glob("*.whl"))}
    if not wheels:
        lock = f"requirements/{os.environ.get(variables.LOCK) or BASE}.txt"
        raise UsageError(
            f"--sync-wheels {folder}: no wheel in it; type: python3 -m pip download"
            f" --require-hashes --only-binary :all: -r {lock} -d {folder}"
        )
    return _beside(code, wheels)


def _beside(code: WorkingTree, files: Mapping[str, Path]) -> WorkingTree:
    # below .rackrun/, so that nothing of the user's own folder is replaced
    sources = {f"{INSTALLED}/{path}": source for path, source in files.items()}
    digests = {path: file_digest(str(source)) for path, source in sources.items()}
    return replace(
        code,
        files={**code.files, **digests},
        modes={**code.modes, **dict.fromkeys(sources, 0o644)},
        sources={**code.sources, **sources},
    )


def remarks_on(folder: Path, paths: Sequence[str]) -> list[str]:
    """Return remarks on files that are missing from the code, or too big for it."""
    remarks = [
        f"{path} is a git repository of its own: its files are not compared with those of hosts,"
        " and --sync does not copy them"
        for path in paths
        if _is_repository(folder / path)
    ]
    sizes = {path: (folder / path).lstat().st_size for path in paths if (folder / path).is_file()}
    if (total := sum(sizes.values())) > LARGE_BYTES:
        biggest = max(sizes, key=sizes.__getitem__)
        whole = f"the code has {data_size(total)}, of which {biggest} has"
        remarks.append(f"{whole} {data_size(sizes[biggest])}: add it to .gitignore")
    return remarks


def unchecked_notice(code: WorkingTree) -> str:
    """Return the notice about programs that are not compared, as git does not track them."""
    programs = [path for path in code.untracked if path.endswith(".py")]
    if not programs:
        return ""
    hint = f"type: git add {shlex.join(programs if len(programs) <= NAMED else ['*.py'])}"
    return f"git does not track {_some_of(programs)}: not compared with the files on hosts; {hint}"


def _some_of(paths: Collection[str]) -> str:
    return one_line(first_few(list(paths), NAMED))
