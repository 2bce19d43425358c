"""An interpreter whose imports are done: a script to call as `python`.

What is started by the script runs in a process forked from the server of
tests/lab/warm_server.py, in the network and under the host name of the script, and with its
project. The script waits for it, passes signals on, and ends with its exit code. tests/lab/warm.py
does the same for children of a test; this is for commands that start `python` themselves, as
./run-local and agents on hosts do.
"""

import os
import sys
from pathlib import Path

CLIENT = """\
#!{real} -IS
import os, sys
words = sys.argv[1:]
while words and words[0][:1] == "-" and words[0] not in ("-m", "-c"):
    del words[: 1 + (words[0] in ("-W", "-X"))]
kind = words[0] if words else ""
torch = "torch.distributed.run", "import torch", "from training"
is_ours = kind == "-m" or kind == "-c" and any(name in words[1] for name in torch)
if not is_ours and not kind.endswith((".py", "/rackrun")):
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
import json, signal, socket
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({socket!r})
for number in (getattr(signal, "SIG" + name) for name in "INT TERM HUP USR1 ABRT".split()):
    signal.signal(number, lambda number, frame: connection.send(str(int(number)).encode()))
about = dict(words=words, folder=os.getcwd(), environment=dict(os.environ), session=False)
about["project"] = {project!r}
socket.send_fds(connection, [json.dumps(about).encode()], [0, 1, 2])
for descriptor in (0, 1, 2):
    os.close(descriptor)
connection.recv(64)  # the process id
code = int(connection.recv(64) or 1)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def write_client(path: Path, listening: Path, project: str = "") -> None:
    """Write the script that stands for `python`, of a project with an environment of its own."""
    about = {"real": sys.executable, "socket": os.fspath(listening), "project": project}
    path.write_text(CLIENT.format(**about))
    path.chmod(0o755)
