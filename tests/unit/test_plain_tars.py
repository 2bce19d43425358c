"""Tars without an index: what is read of them, and what is noticed."""

import io
import ssl
import tarfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from rackrun.data_location import are_plain_tars, expanded, is_folder, parts_of, with_joined_data
from rackrun.errors import DataError, UsageError
from rackrun.shards import tar_streams
from rackrun.shards.class_names import named_classes
from rackrun.training.data.tars import Labels, TarPart, part_of, samples_in
from tests.lab.data import tar

PIECE_BYTES = 1 << 13
LABELS = Labels(("cat", "dog", "owl"))
WHOLE = tar({f"{n}.{suffix}": b"%d" % (n % 3) for n in range(20) for suffix in ("jpg", "cls")})


def read(folder, content):
    """Return key and class of each sample of a tar."""
    (folder / "s.tar").write_bytes(content)
    return [
        (each.sample.key, each.sample.label) for each in samples_in(str(folder / "s.tar"), LABELS)
    ]


def test_names_are_those_of_webdataset():
    assert expanded("s-{000..002}.tar::t.tar") == ["s-000.tar", "s-001.tar", "s-002.tar", "t.tar"]
    assert expanded("pipe:cat s-{0..1}.tar") == ["pipe:cat s-0.tar", "pipe:cat s-1.tar"]
    assert are_plain_tars("https://h/s-{0..9}.tar") and is_folder("data/shards")
    assert not are_plain_tars("https://h/shards") and not is_folder("https://h/shards")


def test_an_address_in_brackets_is_no_list():
    assert parts_of("http://[::1]:8080/a::http://[fe80::2]/b.tar") == [
        "http://[::1]:8080/a",
        "http://[fe80::2]/b.tar",
    ]


def test_a_command_may_have_the_separator_of_a_list():
    command = "pipe:perl -MFile::Copy s.tar"
    assert parts_of(f"a.tar::{command}::pipe:cat b.tar") == ["a.tar", command, "pipe:cat b.tar"]
    joined = with_joined_data(["--data", command, "--lr", "1", "--data=a.tar"])
    assert joined == ["--lr", "1", f"--data=a.tar::{command}"]


def test_the_last_data_may_not_lack_its_value():
    typed = ["--data", "a.tar", "--data=b.tar", "--data"]
    assert with_joined_data(typed) == typed


@pytest.mark.parametrize("name", ["s.tar.gz::t.tar", "s3://b/s.tar", "s.tar::s.tar"])
def test_what_cannot_be_read_is_refused(name):
    with pytest.raises(UsageError):
        expanded(name)


@pytest.mark.parametrize(
    ("members", "label"),
    [
        ({"a/1.jpg": b"", "a/1.cls": b" 2\n"}, 2),
        ({"a/1.jpg": b"", "a/1.cls": b"dog"}, 1),
        ({"a/1.jpg": b"", "a/1.cls": b"2.0", "a/1.txt": b"a dog, running"}, 2),
        ({"a/1.jpg": b"", "a/1.json": b'{"label": 1}'}, 1),
        ({"a/1.json": b'{"label": "owl", "x": 1}', "a/1.png": b"", "a/1.depth.jpg": b""}, 2),
    ],
)
def test_a_class_is_a_number_or_a_name(tmp_path, members, label):
    assert read(tmp_path, tar({"__info__.json": b"{}"} | members)) == [("a/1", label)]


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"1.jpg": b"", "1.cls": b"3"}, "none of 3 classes"),
        ({"1.jpg": b"", "1.cls": b"cow"}, "none of 3 classes"),
        ({"1.jpg": b"", "1.cls": b"-1"}, "'-1' is not a class"),
        ({"1.jpg": b"", "1.json": b'{"label": true}'}, "'True' is not a class"),
        ({"1.jpg": b"", "1.json": b'{"class": 1}'}, "--label-field"),
        ({"1.jpg": b"", "1.json": b"{"}, "1.json"),
        ({"1.jpg": b""}, "no class"),
        ({"1.cls": b"0"}, "0 images"),
        ({"1.jpg": b"", "1.png": b"", "1.cls": b"0"}, "2 images"),
        ([("1.jpg", b""), ("1.jpg", b""), ("1.cls", b"0")], "twice"),
        ({"readme.txt": b""}, "no samples"),
    ],
)
def test_what_is_no_sample_ends_the_reading(tmp_path, members, why):
    with pytest.raises(DataError, match=why):
        read(tmp_path, tar(members))


def test_class_names_that_may_mean_another_number_are_refused(tmp_path):
    (tmp_path / "c").write_text("0\n1\n7\n")
    with pytest.raises(UsageError, match="is 7 class 2"):
        named_classes(tmp_path / "c")


def test_a_tar_that_is_cut_anywhere_or_lost_a_header_is_noticed(tmp_path):
    assert len(read(tmp_path, WHOLE)) == 20
    with tarfile.open(fileobj=io.BytesIO(WHOLE)) as whole:
        end = whole.getmembers()[-1].offset_data + 512
    for cut in range(0, end + 1, 256):
        with pytest.raises(DataError):
            read(tmp_path, WHOLE[:cut])
    for header in range(0, end, 1024):
        for damage in (bytes(512), bytes(100) + b"\xff" * 412):
            with pytest.raises(DataError):
                read(tmp_path, WHOLE[:header] + damage + WHOLE[header + 512 :])


@given(st.integers(0, 9), st.lists(st.integers(1, 5), min_size=1, max_size=7))
def test_readers_share_samples_whatever_their_number(tars, workers):
    """Ranks with any number of workers each read every sample of every tar once, together."""
    seen = Counter[tuple[str, int]]()
    for rank, count in enumerate(workers):
        parts = part_of([TarPart(str(n)) for n in range(tars)], rank, len(workers))
        for worker in range(count):
            for name, first, every in part_of(parts, worker, count):
                seen.update((name, sample) for sample in range(first, 60, every))
    assert seen == Counter({(str(n), sample): 1 for n in range(tars) for sample in range(60)})


class Handler(BaseHTTPRequestHandler):
    """A server that breaks off its first answer; with /parts/, it sends the rest alone."""

    broken = 1
    pause = 0.0
    secrets: list[str | None] = []

    def do_GET(self):
        self.secrets.append(self.headers.get("Authorization"))
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.end_headers()
            return
        begin = 0
        if self.path.startswith("/parts") and (asked := self.headers.get("Range")):
            begin = int(asked[6:-1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(WHOLE) - 1}/{len(WHOLE)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(WHOLE) - begin))
        self.send_header("ETag", '"1"')
        self.end_headers()
        half = begin + (len(WHOLE) - begin) // 2 if type(self).broken > 0 else len(WHOLE)
        type(self).broken -= 1
        with suppress(BrokenPipeError, ConnectionResetError):  # the reader has left
            for at in range(begin, half, PIECE_BYTES):
                self.wfile.write(WHOLE[at : min(at + PIECE_BYTES, half)])
                time.sleep(type(self).pause)

    def log_message(self, *args):
        pass


def header(kind, size):
    """Return the header of a member of this type."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param((header(b"L", 9) + bytes(512)) * 600 + WHOLE, id="names of names"),
        pytest.param(header(b"x", 1 << 30) + bytes(3 << 20), id="endless attributes"),
        pytest.param(header(b"S", 0) + WHOLE, id="sparse"),
    ],
)
def test_headers_that_are_to_do_harm_are_refused(tmp_path, content):
    with pytest.raises(DataError):
        read(tmp_path, content)


@contextmanager
def served(certificate=None):
    """Yield the URL of a server, with TLS if it has a certificate."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(context)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def url():
    with served() as url:
        yield url


def test_a_server_is_followed_and_continued_where_it_can(url, monkeypatch):
    monkeypatch.setattr(Handler, "broken", 1)
    assert len(list(samples_in(f"{url}/moved/parts/s.tar", LABELS))) == 20
    monkeypatch.setattr(Handler, "broken", 1)
    with pytest.raises(DataError, match="does not send the rest alone"):
        list(samples_in(f"{url}/s.tar", LABELS))
    assert len(list(samples_in(f"{url}/s.tar", LABELS))) == 20


def test_a_slow_server_is_not_one_that_stalls(url, monkeypatch):
    """One request is enough, though the whole takes longer than a stall may."""
    monkeypatch.setattr(tar_streams, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(Handler, "broken", 0)
    monkeypatch.setattr(Handler, "pause", 0.15)
    Handler.secrets.clear()
    assert len(list(samples_in(f"{url}/s.tar", LABELS))) == 20
    assert len(Handler.secrets) == 1


def test_credentials_stay_with_the_server_that_they_are_for(url, tmp_path, monkeypatch):
    """A redirect on it is answered with them, one to another server without."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "secret").write_text("me:hunter2")
    monkeypatch.setenv("RACKRUN_CREDENTIALS", str(tmp_path / "secret"))
    monkeypatch.setenv("RACKRUN_CA", str(tmp_path / "ca.pem"))
    monkeypatch.setattr(Handler, "broken", 0)
    with served(authority.issue_cert("127.0.0.1")) as other:
        for target, kept in (("/s.tar", 2), (f"{other}/s.tar", 1)):
            Handler.secrets.clear()
            assert len(list(samples_in(f"{url}/moved{target}", LABELS))) == 20
            assert [bool(secret) for secret in Handler.secrets] == [True] * kept + [False] * (
                2 - kept
            )


def test_no_redirect_leads_away_from_https_or_on_for_ever(url):
    with pytest.raises(DataError, match="not https"):
        list(samples_in(f"{url}/movedhttp://localhost:1/s.tar", LABELS))
    with pytest.raises(DataError, match="status 302"):
        list(samples_in(f"{url}{'/moved' * 6}/s.tar", LABELS))


def test_a_command_that_fails_is_not_the_end_of_its_tar(tmp_path):
    (tmp_path / "s.tar").write_bytes(WHOLE)
    name = f"pipe:cat {tmp_path}/s.tar"
    assert len(list(samples_in(name, LABELS))) == 20
    for failing in (f"{name}; exit 3", f"pipe:head -c 5000 {tmp_path}/s.tar; exit 3"):
        with pytest.raises(DataError, match="ended with 3"):
            list(samples_in(failing, LABELS))
