"""The program for detached runs on a host: it starts a controller, lists and follows runs.

A controller writes into ~/.rackrun/RUN-ID. The folder is removed a month after the run has ended,
or at once if the run never began:

    summary.json   what runs where      record           all that happened (see record.py)
    controller.err errors of its own    folder           a link to the newest attempt's run folder
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from rackrun.contract import variables
from rackrun.launcher.remote import service
from rackrun.launcher.remote.files import SCRATCH, contents, is_own_folder, write_new
from rackrun.launcher.remote.processes import (
    all_pids,
    command_line,
    environment_of,
    is_mine,
    kill,
    link_target,
    look_up,
    send_signal,
    state_of,
)

STATES = os.path.expanduser("~/.rackrun")
SUMMARY = "summary.json"
FOLDER = "folder"
LIVE_HOST = ("name", "node", "state", "step")
PIECE_BYTES = 1 << 18
LOOK_SECONDS = 0.1
KEPT_SECONDS = 30 * 86400.0
BEAT_SECONDS = 5.0  # a follower gets an answer at least this often
JSON_BYTES = 1 << 24
LAST_LINES = 20
MOST_LISTED = 200  # runs in one list
PROGRAM = "rackrun.launcher.detached.controller"
START = """\
import sys
if sys.version_info < (3, 11):
    sys.exit("%s is older than 3.11; name another one with python= in hosts.txt" % sys.executable)
sys.path.insert(0, sys.argv[1])
import rackrun.launcher.detached.controller
rackrun.launcher.detached.controller.main()
"""
STARTED: list[subprocess.Popen[bytes]] = []
"""The controller that this program has started and not yet let go, if any."""
STATE_OF: list[str] = []
"""Its folder, made before it is started."""


def serve() -> None:
    """Carry out orders from standard input until it ends."""
    service.announce()
    sys.stdout.buffer.flush()
    service.serve(
        {
            "start": start,
            "ready": ready,
            "go": go,
            "find": find,
            "list": list_runs,
            "follow": follow,
            "interrupt": interrupt,
            "alive": lambda run: {"yes": bool(controller_of(run))},
            "processes": processes,
            "sweep": sweep,
            "exists": lambda path: {"yes": os.path.exists(path)},
        }
    )
    give_up()  # a run that could not begin before the launcher was gone


# -- starting a controller


def start(
    summary: dict[str, Any], python: str, workdir: str, code: dict[str, str], order: dict[str, Any]
) -> dict[str, Any]:
    """Write the launcher's code, start a controller, and return the port at which it listens."""
    clear_old()
    state = os.path.join(STATES, summary["run"])
    os.makedirs(STATES, mode=0o700, exist_ok=True)
    os.mkdir(state, 0o700)
    STATE_OF.append(state)
    for name, text in code.items():
        path = os.path.join(state, "code", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_new(path, text.encode())
    write_new(os.path.join(state, SUMMARY), json.dumps(summary).encode())
    os.makedirs(workdir, exist_ok=True)
    with open(os.path.join(state, "controller.err"), "wb") as errors:
        controller = subprocess.Popen(
            # Isolated and without site: what is installed there cannot replace a module of ours.
            [python, "-I", "-S", "-X", "utf8", "-c", START, os.path.join(state, "code")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=workdir,
            env={**os.environ, variables.CONTROLLER: summary["run"]},
            start_new_session=True,
            bufsize=0,  # so that select sees all that was not read yet
        )
    STARTED.append(controller)
    return _hear_controller(json.dumps({**order, "state": state}))


def ready() -> dict[str, Any]:
    """Wait until all hosts have called the controller; return its answer."""
    return _hear_controller("")


def go() -> dict[str, Any]:
    """Let the controller begin; from then on it outlives this program."""
    reply = _hear_controller("go")
    if "error" not in reply:
        STARTED.clear()
        STATE_OF.clear()
    return reply


def give_up() -> None:
    """End and remove a run that did not begin."""
    for controller in STARTED:
        controller.kill()
        controller.wait()
    for state in STATE_OF:
        shutil.rmtree(state, ignore_errors=True)


def _hear_controller(line: str) -> dict[str, Any]:
    # Its answer, or its last output when it ended instead.
    controller = STARTED[-1]
    assert controller.stdin is not None and controller.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        if line:
            with open(controller.stdin.fileno(), "wb", closefd=False) as pipe:
                pipe.write(line.encode() + b"\n")
    output = controller.stdout.fileno()
    # Standard input is ready here only at its end: the launcher sends no order before this reply.
    if output not in select.select([output, 0], [], [])[0]:
        raise service.Disconnected
    line_read = controller.stdout.readline()
    if line_read:
        return dict(json.loads(line_read))
    controller.wait()
    with open(os.path.join(STATE_OF[-1], "controller.err"), "rb") as errors:
        complaints = errors.read().decode(errors="replace").strip().splitlines()
    return {"error": (complaints or ["the controller ended without a message"])[-1]}


def clear_old() -> None:
    """Remove what is left of runs that ended a month ago, or never began."""
    paths = [glob.glob(os.path.join(STATES, "*", name)) for name in ("record", "code")]
    for state in {os.path.dirname(path) for path in sum(paths, [])}:
        newest = os.path.join(state, "record" if _is_run(state) else "code")
        is_old = time.time() - os.path.getmtime(newest) > KEPT_SECONDS
        if is_old and not (_is_run(state) and _is_controlled(newest)):
            shutil.rmtree(state, ignore_errors=True)


# -- asking


def find(run: str) -> dict[str, Any]:
    """Return the facts about a run, by its name or the start of its id; {} where there is none."""
    folders = matching(run)
    if len(folders) > 1:
        return {"error": f"several runs are called {run}: {', '.join(map(in_words, folders))}"}
    return _facts_of(folders[0]) if folders else {}


def matching(run: str) -> list[str]:
    """Return the folders of the runs that match: by id, else by name.

    A name is often used again: of several runs of one name, the only one that runs is meant.
    """
    folders = _state_folders()
    matches = [path for path in folders if os.path.basename(path).startswith(run)]
    matches = matches or [path for path in folders if name_of(path) == run]
    running = [path for path in matches if _is_controlled(os.path.join(path, "record"))]
    return running if len(running) == 1 else matches


def in_words(path: str) -> str:
    """Return the id and the name of a run."""
    return f"{os.path.basename(path)} ({name_of(path)})"


def name_of(path: str) -> str:
    """Return the name of the run in a folder."""
    summary = _read_json(os.path.join(path, SUMMARY))
    return str(summary.get("name", "")) if isinstance(summary, dict) else ""


def _state_folders() -> list[str]:
    begun = [path for path in glob.glob(os.path.join(STATES, "*")) if _is_run(path)]
    newest_last = sorted(begun, key=lambda path: os.path.getmtime(os.path.join(path, SUMMARY)))
    return newest_last[::-1]


def list_runs() -> dict[str, Any]:
    """Return this account's newest detached runs that began here, and its agents here."""
    agents, by_identity = [], agents_of("")
    for pid in our_pids() if by_identity else ():
        agent = by_identity.get(_identity_of(pid))
        if agent:
            job = _read_json(os.path.join(agent["scratch"], "command.json"))
            is_whole = isinstance(job, dict)
            agents.append(
                {
                    "run": os.path.basename(agent["scratch"]).split("-")[1],
                    "folder": str(job.get("folder", "")) if is_whole else "",
                    "command": job.get("command", []) if is_whole else [],
                    "seconds": described(pid).get("seconds", 0.0),
                }
            )
    runs = [_facts_of(path) for path in _state_folders()[:MOST_LISTED]]
    return {"runs": runs, "agents": agents}


def _facts_of(path: str) -> dict[str, Any]:
    record = os.path.join(path, "record")
    alive = _is_controlled(record)
    controller = controller_of(os.path.basename(path)) if alive else 0
    return {
        "summary": _read_json(os.path.join(path, SUMMARY)),
        "folder": link_target(os.path.join(path, FOLDER)),
        "live": live_in(os.path.join(path, FOLDER)),
        "alive": alive,
        "stopped": controller if _is_stopped(controller) else 0,
        **last_words(record),
    }


def live_in(folder: str) -> dict[str, Any]:
    """Return the state of a run that goes on, from its folder; of hosts only `LIVE_HOST`."""
    live = _read_json(os.path.join(folder, "live.json"))
    with contextlib.suppress(KeyError, TypeError):  # no run goes on there, or the file is damaged
        hosts = [{name: host[name] for name in LIVE_HOST} for host in live["hosts"]]
        return {"run_id": live["run_id"], "seconds": live["seconds"], "hosts": hosts}
    return {}


def _is_run(path: str) -> bool:
    return os.path.exists(os.path.join(path, "record"))


def _is_controlled(record: str) -> bool:
    with open(record, "rb") as file:
        try:  # a controller holds a lock on its record for as long as it lives
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def last_words(record: str) -> dict[str, Any]:
    """Return `finish` and `end` of a record: the end of the last attempt, and of the run."""
    with open(record, "rb") as file:
        # A record grows for as long as its run; what ends an attempt and a run is at its end.
        file.seek(max(0, file.seek(0, os.SEEK_END) - PIECE_BYTES))
        lines = file.read().splitlines()
    ending: dict[str, Any] = {}
    for line in lines[-LAST_LINES:]:
        if line.startswith((b'{"finish"', b'{"end"')):
            with contextlib.suppress(ValueError):
                ending.update(json.loads(line))
    return ending


def _read_json(path: str) -> Any:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return json.loads(contents(path, JSON_BYTES))
    return {}


def interrupt(run: str, kill: bool = False) -> dict[str, Any]:
    """Interrupt the controller as Ctrl-C does a launcher, or end it; return whether there was one.

    Nothing is read in the home directory, whose server may not answer.
    """
    pid = controller_of(run)
    if pid:
        # STOP_SIGNAL of supervision/signals.py, which is not sent to hosts.
        send_signal(pid, signal.SIGKILL if kill else signal.SIGUSR2)
    return {"yes": bool(pid)}


def controller_of(run: str) -> int:
    """Return the process id of a run's controller; 0 when there is none."""
    return next((pid for pid in our_pids() if _is_controller(pid, environment_of(pid), run)), 0)


# -- following


def follow(run: str, on: bool) -> dict[str, Any]:
    """Send the entries of a record, each output with its bytes; `on`: wait for more until its end.

    A heartbeat every few seconds shows that this host answers, and names a stopped controller. The
    last answer is no entry: it has whether the controller lives.
    """
    path = os.path.join(STATES, run, "record")
    reader, controller, times_stopped = RecordReader(), controller_of(run), 0
    beat_at = time.monotonic() + BEAT_SECONDS
    with open(path, "rb") as record:
        while not reader.over:
            alive = _is_controlled(path)
            for line in lines_of(record):
                reader.pass_on(line)
            if alive and on and time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_SECONDS
                # A tracer stops it only for moments: two beats in a row have to find it stopped.
                times_stopped = times_stopped + 1 if _is_stopped(controller) else 0
                named = controller if times_stopped > 1 else 0
                service.write(json.dumps({"beat": named}).encode())
            sys.stdout.buffer.flush()
            # Standard input is ready when the follower has gone: it sends no order meanwhile.
            if reader.over or not (alive and on) or select.select([0], [], [], LOOK_SECONDS)[0]:
                break
    reader.close()
    return {"alive": _is_controlled(path)}


def _is_stopped(pid: int) -> bool:
    return state_of(pid) in ("T", "t")


def lines_of(record: IO[bytes]) -> Iterator[bytes]:
    """Yield the whole lines that are there now: the last one may still be in the making."""
    while True:
        start = record.tell()
        line = record.readline()
        if not line.endswith(b"\n"):
            record.seek(start)
            return
        yield line


class RecordReader:
    """Sends entries, and the bytes of logs that they announce."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.files: dict[str, IO[bytes]] = {}
        self.over = False

    def pass_on(self, line: bytes) -> None:
        """Send an entry, an output with its bytes."""
        if line.startswith(b'{"output"'):
            self.send_output(json.loads(line)["output"])
            return
        if line.startswith(b'{"attempt"'):
            self.close()
            entry = json.loads(line)
            self.folders = entry["attempt"]["logs"]
            entry["age"] = time.time() - entry["attempt"]["at"]
            line = json.dumps(entry).encode()
        self.over = line.startswith(b'{"end"')
        service.write(line)

    def send_output(self, output: list[Any]) -> None:
        """Send the number of bytes, then the bytes: fewer than written if the disk was full."""
        node, rank, stream, size = output
        name = "torchrun" if rank is None else f"rank-{rank}"
        data = self.read(os.path.join(self.folders[node], f"{name}.{stream}"), size)
        service.write(json.dumps({"output": [node, rank, stream, len(data)]}).encode())
        sys.stdout.buffer.write(data)

    def read(self, path: str, size: int) -> bytes:
        """Return the next bytes of a log; fewer when it has no more, or cannot be read."""
        try:
            if path not in self.files:
                self.files[path] = open(path, "rb")  # noqa: SIM115 - closed with the attempt
            return self.files[path].read(size)
        except OSError:
            return b""

    def close(self) -> None:
        """Close the logs of an attempt."""
        for file in self.files.values():
            file.close()
        self.files.clear()


# -- what runs here


def processes(run: str) -> dict[str, Any]:
    """Return the processes of a run on this host; of agents, when the launcher last called.

    Only those of this account: any other account of this host can set any variable, take any
    name, and make any folder in /tmp that is not there yet.
    """
    mark, agents, facts = f"{variables.RUN_ID}={run}".encode(), agents_of(run), []
    for pid in our_pids():
        environment = environment_of(pid)
        if _is_controller(pid, environment, run):
            facts.append({"role": "controller", **described(pid)})
        elif agent := agents.get(_identity_of(pid)):
            facts.append({"role": "agent", **described(pid), **agent})
        elif any(variable.startswith(mark) for variable in environment):
            facts.append({**_role_of(pid, environment), **described(pid)})
        elif is_relay(pid, run):
            facts.append({"role": "relay", **described(pid)})
    alive = [process for process in facts if "pid" in process]
    return {"processes": alive, "python": sys.executable}


def agents_of(run: str) -> dict[Any, dict[str, Any]]:
    """Return the agents of a run by their identities, as their private folders have them."""
    by_identity: dict[Any, dict[str, Any]] = {}
    for scratch in filter(is_own_folder, glob.glob(f"{SCRATCH}{run}*")):
        path = os.path.join(scratch, "agent.pid")
        identity = _read_json(path)
        if isinstance(identity, list) and len(identity) == 5:
            pid, started, _, _, space = identity
            command = _read_json(os.path.join(scratch, "command.json"))
            lease = command.get("lease_seconds") if isinstance(command, dict) else None
            with contextlib.suppress(OSError, TypeError):  # gone just now; no keys for a table
                by_identity[pid, started, space] = {
                    "scratch": scratch,
                    "heard_seconds_ago": round(max(0.0, time.time() - os.path.getmtime(path)), 1),
                    "lease_seconds": lease if isinstance(lease, (int, float)) else 0.0,
                }
    return by_identity


def our_pids() -> Iterator[int]:
    """Yield the processes that this account started; a setuid program runs as another one."""
    return filter(is_mine, sorted(all_pids()))


def _is_controller(pid: int, environment: list[bytes], run: str) -> bool:
    return f"{variables.CONTROLLER}={run}".encode() in environment and PROGRAM in command_line(pid)


def is_relay(pid: int, run: str) -> bool:
    """Return True for a relay of the run, or its carrier: they hold a mark open."""
    mark = f"/memfd:rackrun{run} "
    try:
        with open(f"/proc/{pid}/comm") as file:
            if file.read().strip() != f"rackrun{run}":  # cheap: a process may have many descriptors
                return False
        folder = f"/proc/{pid}/fd"
        return any(link_target(f"{folder}/{name}").startswith(mark) for name in os.listdir(folder))
    except OSError:
        return False


def sweep(run: str) -> dict[str, Any]:
    """End relays that did not end with their controller, because they were stopped."""
    for pid in our_pids():
        process = look_up(pid)
        if process is not None and is_relay(pid, run):
            kill(process)
    return {}


def _role_of(pid: int, environment: list[bytes]) -> dict[str, Any]:
    command, values = command_line(pid), dict(v.partition(b"=")[::2] for v in environment)
    scratch = os.path.dirname(values.get(variables.REPORTS.encode(), b"").decode(errors="replace"))
    rank = values.get(b"RANK", b"").decode(errors="replace")
    if not rank.isdigit():
        role = "torchrun" if "--node-rank=" in command else "other"
        return {"role": role, "scratch": scratch}
    role = "shim" if f"{scratch}/agent.zip" in command else "rank"
    return {"role": role, "rank": int(rank), "scratch": scratch}


def _identity_of(pid: int) -> tuple[int, int, str] | None:
    # What an agent writes about itself: its id, its start time, its namespace of ids.
    process = look_up(pid)
    try:
        with open(f"/proc/{pid}/status") as file:
            ids = [line.split() for line in file if line.startswith("NSpid:")]
        space = os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
    # In a container a process has another id than here: the last one is what it knows.
    return (int(ids[0][-1]) if ids else pid, process.started, space) if process else None


def described(pid: int) -> dict[str, Any]:
    """Return process id, state, and the seconds since it was started; nothing when it is gone."""
    process = look_up(pid)
    if process is None:
        return {}
    started = process.started / os.sysconf("SC_CLK_TCK")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return {"pid": pid, "state": process.state, "seconds": round(max(0.0, seconds), 1)}
