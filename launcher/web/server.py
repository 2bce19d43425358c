"""A server of one page for one user: on loopback, with a token, for GET only."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ADDRESS = "127.0.0.1"
TOKEN_BYTES = 16
PAGE = Path(__file__).with_name("board.html")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

State = Callable[[], Mapping[str, Any]]
"""Returns what there is to see now, as JSON has it."""


@contextmanager
def served(state: State) -> Iterator[str]:
    """Serve the page while the block runs; yield its address, which has the token."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    server = BoardServer(token, state)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{ADDRESS}:{server.server_port}/{token}/"
    finally:
        server.shutdown()
        server.server_close()


class BoardServer(ThreadingHTTPServer):
    """Listens on a free port of this machine."""

    daemon_threads = True

    def __init__(self, token: str, state: State) -> None:
        """Call `state` in the server's threads."""
        super().__init__((ADDRESS, 0), BoardRequest)
        self.token = token
        self.state = state

    def is_addressed(self, host: str) -> bool:
        """Return whether a browser meant this server: another name may be made to lead here."""
        return host in (f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}")


class BoardRequest(BaseHTTPRequestHandler):
    """Answers GET of the page and of its data; http.server refuses all other methods with 501."""

    server: BoardServer
    timeout = 30  # seconds for a silent client

    def do_GET(self) -> None:
        """Answer with the page, its data, or 404."""
        token, slash, name = self.path.lstrip("/").partition("/")
        is_authorized = hmac.compare_digest(token.encode(), self.server.token.encode())
        if (
            not is_authorized
            or not slash
            or not self.server.is_addressed(self.headers.get("Host", ""))
        ):
            self.send_error(HTTPStatus.NOT_FOUND)
        elif name == "":
            nonce = secrets.token_urlsafe(TOKEN_BYTES)
            self._respond("text/html", PAGE.read_text().replace("{nonce}", nonce).encode(), nonce)
        elif name == "live.json":
            self._respond("application/json", json.dumps(self.server.state()).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _respond(self, kind: str, body: bytes, nonce: str = "") -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY.format(nonce=nonce))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Keep requests off the terminal: they have the token."""
