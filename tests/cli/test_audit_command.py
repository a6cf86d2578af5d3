"""``baton audit`` where nobody can be asked: one line, exit code 2. What a Baton tells is tested in tests/router/test_audit.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.main import app

Serve = Callable[[int, bytes], str]
WORKER = {
    "worker_id": "decode-0",
    "violations": 0,
    "published": 1,
    "hits": 2,
    "deep": {"passed": 1, "failed": 0, "skipped": 0, "errors": 0},
    "largest_difference": 0.0,
}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server that answers every GET alike."""
    told: list[tuple[int, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = told[-1]
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def start(status: int, body: bytes) -> str:
            told.append((status, body))
            return f"http://127.0.0.1:{server.server_address[1]}"

        yield start
        server.shutdown()
        thread.join()


def as_json(**changes: Any) -> bytes:
    return json.dumps({"violations": 0, "workers": [WORKER], "entries": []} | changes).encode()


@pytest.mark.parametrize(
    ("options", "status", "body", "why"),
    [
        ((), 200, b'{"ok": true}', "violations: Field required"),
        (("--json",), 200, b'{"ok": true}', "violations: Field required"),
        (("--json",), 200, b"<html>hello</html>", "Invalid JSON"),
        ((), 200, b"[]", "should be an object"),
        ((), 200, as_json(workers=[{**WORKER, "deep": {}}]), "workers.0.deep.passed: Field required"),
        ((), 200, as_json(entries=[{"worker_id": 7}]), "entries.0.worker_id"),
        ((), 404, b"<!DOCTYPE HTML><p>nothing here", "HTTP 404"),
    ],
)
def test_another_server_is_named_as_such(serve: Serve, options: tuple[str, ...], status: int, body: bytes, why: str) -> None:
    url = serve(status, body)
    told = CliRunner().invoke(app, ("audit", "--url", url, *options))
    assert told.exit_code == 2, told.output
    assert told.stdout == ""
    assert told.stderr.startswith(f"error: {url} is not a Baton server (GET /audit: ")
    assert why in told.stderr
    assert told.stderr.count("\n") == 1
    assert "<" not in told.stderr


def test_a_server_that_fails_is_not_called_another_one(serve: Serve) -> None:
    url = serve(503, b"later")
    told = CliRunner().invoke(app, ("audit", "--url", url))
    assert told.exit_code == 2
    assert told.stderr == f"error: {url} can't tell (GET /audit: HTTP 503)\n"


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://[", "ftp://127.0.0.1"])
def test_no_server_is_one_line(url: str) -> None:
    told = CliRunner().invoke(app, ("audit", "--url", url))
    assert told.exit_code == 2
    assert told.stderr.startswith("error: no answer from ")
    assert told.stderr.count("\n") == 1


def test_fields_that_we_do_not_know_are_kept(serve: Serve) -> None:
    body = as_json(more={"a": 1})
    told = CliRunner().invoke(app, ("audit", "--json", "--url", serve(200, body)))
    assert told.exit_code == 0
    assert json.loads(told.stdout) == json.loads(body)


def test_help_tells_the_exit_codes() -> None:
    told = CliRunner().invoke(app, ("audit", "--help"), env={"COLUMNS": "200"})
    assert "Exit code 1: it found something; 2: it can't be asked." in told.stdout
