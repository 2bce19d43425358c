"""A shard server as the preflight sees it, and which secrets it is sent."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackrun.contract import variables
from rackrun.errors import UsageError
from rackrun.launcher.remote import shard_access
from rackrun.shards.http.server import authorization, tls_context
from tests.lab.waiting import until

SPLIT = {"name": "train", "shards": [{"name": "a.tar"}]}
DATASET = json.dumps({"dataset": "toy", "splits": [SPLIT]}).encode()
FOUND = {"dataset": "toy", "splits": ["train"]}
GOOD = {
    "dataset.json": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATASET) + DATASET,
    "a.tar": b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n\r\nx",
}


class Server:
    """A server of given bytes by path, which records its requests."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.listener = socket.create_server((address, 0))
        self.url = f"http://{address}:{self.listener.getsockname()[1]}"
        self.asked: list[str] = []
        self.says: dict[str, bytes] = dict(GOOD)
        self.then: Callable[[socket.socket], object] = lambda caller: None
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(caller,), daemon=True).start()

    def answer(self, caller: socket.socket) -> None:
        try:
            with caller:
                asked = caller.recv(1 << 16).decode()
                self.asked.append(asked)
                caller.sendall(self.says.get(asked.split()[1].rpartition("/")[2], b""))
                self.then(caller)
        except OSError:
            pass  # the client has closed the connection


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.listener.close()


def secret(folder: Path) -> dict[str, str]:
    (folder / "secret").write_text("reader:hunter2")
    return {"RACKRUN_CREDENTIALS": str(folder / "secret")}


def moved(target: str, code: int = 302) -> bytes:
    return f"HTTP/1.1 {code} Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("name", ["dataset.json", "a.tar"])
@pytest.mark.security("WEB-4")
def test_a_redirect_takes_no_password_to_another_server(server, tmp_path, code, name):
    """WEB-4: neither for dataset.json nor for a shard; the finding names the other server."""
    other = Server("127.0.0.7")
    server.says[name] = moved(f"{other.url}/{name}", code)
    result = shard_access.shards(server.url, str(tmp_path), False, secret(tmp_path))
    other.listener.close()
    assert result["error"].startswith(f"{server.url}/{name}: {code} to {other.url}")
    assert "Authorization: Basic" in server.asked[0]
    assert not other.asked


def test_a_redirect_on_the_same_server_is_followed_as_the_ranks_do(server, tmp_path):
    """Some are: a server may keep its shards in another folder. A circle of them is an error."""
    server.says["dataset.json"] = moved("/there/there")
    server.says["there"] = GOOD["dataset.json"]
    assert shard_access.shards(server.url, str(tmp_path), True, {}) == FOUND
    server.says["there"] = moved("/there/there")
    assert (
        "too many redirects" in shard_access.shards(server.url, str(tmp_path), False, {})["error"]
    )


def test_a_relative_path_of_a_secret_is_one_of_the_working_directory(server, tmp_path):
    """As for the ranks. The program itself stays in its folder: it starts interpreters there."""
    secret(tmp_path)
    before = Path.cwd()
    relative = {variables.CREDENTIALS: "secret"}
    assert shard_access.shards(server.url, str(tmp_path), False, relative) == FOUND
    assert "Authorization: Basic" in server.asked[0]
    assert Path.cwd() == before


def test_a_password_crosses_no_network_in_the_clear(tmp_path):
    """A name that begins like this machine's number is the name of any machine."""
    assert shard_access.is_private("http://127.0.0.9:80/") and shard_access.is_private(
        "https://far/"
    )
    for url in ("http://127.evil.example/", "http://far/", "http://127.0.0.1.example/"):
        assert not shard_access.is_private(url)


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer in HTTP (BadStatusLine)"),
        (b"", "Remote end closed connection"),
        (
            b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
            "does not answer in HTTP (HTTPException)",
        ),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000, "does not answer in HTTP (LineTooLong)"),
        (b"HTTP/1.1 404 Not \x1b[31m\r\n\r\n", "404"),
        (moved("http://[", 301), "301 to nowhere"),
        (HEAD + b"[" * 100_000, "dataset.json is not a valid manifest"),
        (HEAD + b"9" * 5000, "dataset.json is not a valid manifest"),
        (HEAD + b"\xff", "dataset.json is not a valid manifest"),
        (HEAD + b'{"dataset": 5, "splits": []}', "dataset.json is not a valid manifest"),
        (HEAD + b'{"dataset": "x", "splits": 5}', "dataset.json is not a valid manifest"),
        (
            HEAD + b'{"dataset": "x", "splits": [{"shards": [{"name": "a\\r\\nb"}]}]}',
            "does not answer in HTTP (InvalidURL)",
        ),
        (HEAD + b" " * (shard_access.MANIFEST_BYTES + 1), "dataset.json is not a valid manifest"),
    ],
    ids=range(13),
)
def test_what_a_server_says_wrong_is_a_finding(server, tmp_path, data, error):
    """Broken HTTP, and a dataset.json that is none or endless, are errors of that host."""
    server.says["dataset.json"] = data
    result = shard_access.shards(server.url, str(tmp_path), False, {})
    assert set(result) == {"error"}
    assert error in result["error"]


SECRETS = (variables.AUTHORITY, variables.CERTIFICATE, variables.CREDENTIALS)


@pytest.mark.parametrize("variable", [*SECRETS, "NETRC"])
@pytest.mark.parametrize("broken", ["missing", "a folder", "no text"])
def test_a_secret_that_cannot_be_used_is_named(variable, broken, tmp_path, monkeypatch):
    """By its variable and path, in the preflight and in the ranks; ~/.netrc is the ranks' own."""
    path = tmp_path / "secret"
    if broken == "a folder":
        path.mkdir()
    elif broken == "no text":
        path.write_bytes(b"reader:\xff\xfe\n")
    monkeypatch.setenv(variable, str(path))
    with pytest.raises(UsageError, match=re.escape(str(path))) as ranks:
        tls_context()
        authorization("127.0.0.1", tls=True)
    assert str(ranks.value).startswith((f"{variable}=", f"{path}:"))
    if variable != "NETRC":
        result = shard_access.shards("https://127.0.0.1:1/", "", False, {variable: str(path)})
        assert result["error"].startswith(f"{variable}={path}: ")


@pytest.mark.parametrize("begin", [b"", HEAD])
def test_a_server_that_drips_is_not_waited_for(server, tmp_path, begin, monkeypatch):
    """A byte now and then, in the head or in the body: the limit is for all of it."""
    enough = threading.Event()

    def drip(caller: socket.socket) -> None:
        while not enough.wait(0.1):
            caller.sendall(b"H")

    server.says["dataset.json"] = begin
    server.then = drip
    monkeypatch.setattr(shard_access, "SHARDS_SECONDS", 1.0)
    try:
        result = shard_access.shards(server.url, str(tmp_path), False, {})
    finally:
        enough.set()
    assert result == {"error": f"{server.url}: does not answer in time"}


def test_a_launch_names_the_host_whose_server_sends_it_elsewhere(start_lab, server, tmp_path):
    """WEB-4: through real sshd: 65, one line, and the other server has heard nothing."""
    lab = start_lab(1)
    other = Server("127.0.0.7")
    server.says["dataset.json"] = moved(f"{other.url}/dataset.json")
    args = [f"{name}={value}" for name, value in secret(tmp_path).items()]
    code, _, err = lab.result_of("--env", *args, lab.cheap_hosts(), "catdog", "--data", server.url)
    other.listener.close()
    assert code == 65, err
    (line,) = [line for line in err.splitlines() if "which is not followed" in line]
    assert line.startswith("error: 127.0.0.2: shards: ")
    until(lambda: bool(server.asked), "the first server is asked", 20)
    assert not other.asked


def test_a_version_is_looked_for_in_its_folder(server, tmp_path):
    """data@2 and URL/@2 are checked by the folder's manifest; the ranks look at the version."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset.json").write_bytes(DATASET)
    for location in ("data", "data@2", f"{server.url}/@2"):
        assert shard_access.shards(location, str(tmp_path), False, {}) == FOUND
