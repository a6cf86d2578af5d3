"""A ``baton`` command on a terminal of its own, and a server that answers as a test says: both real, over a pty and a socket."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

import demo

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
CTRL_C = "\x03"
CTRL_D = "\x04"
UP = "\x1b[A"
_STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\x01|\x02")


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    return kept | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"} | variables


class Terminal:
    """What the command writes is read by ``expect``, in order and without styles. Ends the process on the way out."""

    def __init__(self, *args: str, **variables: str) -> None:
        self._master, slave = pty.openpty()

        def become_leader() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal

        self.process = subprocess.Popen(
            [sys.executable, "-m", "baton", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=become_leader,
            env=environment(**variables),
        )
        os.close(slave)
        self._unread = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def enter(self, line: str) -> None:
        self.type(f"{line}\r")

    def expect(self, pattern: str) -> re.Match[str]:
        """The next match; everything up to its end counts as read."""
        until = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self._unread, re.DOTALL)) is None:
            assert time.monotonic() < until, f"no {pattern!r} in {self._unread!r}"
            assert self._read(), f"it ended without {pattern!r}: {self._unread!r}"
        self._unread = self._unread[found.end() :]
        return found

    def exit_code(self) -> int:
        """Of its own end; what it says until then is read."""
        until = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < until, f"it doesn't end: {self._unread!r}"
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Whatever comes within a while. False at the end."""
        ready, _, _ = select.select([self._master], [], [], 0.1)
        if not ready:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says so when the other side is closed
            return False
        self._unread = _STYLE.sub("", self._unread + self._decoder.decode(data))  # a read may end in the middle of either
        return bool(data)


@dataclass
class ScriptedServer:
    """Answers chat requests one after the other from ``answers``: a list of chunks to stream, or a pair of HTTP status and body."""

    url: str
    answers: list[Sequence[Any]] = field(default_factory=list)
    heard: list[dict[str, Any]] = field(default_factory=list)
    """Bodies."""
    left: threading.Event = field(default_factory=threading.Event)
    """A client has closed its connection while it was being answered."""


HANG = object()
"""In an answer: nothing more comes until the client leaves."""
CUT = object()
"""In an answer: the connection ends here."""


def says(*pieces: str, **more: Any) -> list[Any]:
    """A whole streamed answer."""
    return [*[delta(content=piece) for piece in pieces], {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]} | more, "[DONE]"]


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


@contextlib.contextmanager
def scripted_server(answers: Sequence[Sequence[Any]]) -> Iterator[ScriptedServer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "scripted", "owned_by": "a test"}]})

        def do_POST(self) -> None:
            server.heard.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            answer = server.answers.pop(0)
            if isinstance(answer, tuple):
                status, body = answer
                self._send(status, body)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.close_connection = True
            for chunk in answer:
                if chunk is CUT:
                    return
                if chunk is HANG:
                    self.connection.settimeout(PATIENCE_S)
                    if not self.connection.recv(1):
                        server.left.set()
                    return
                data = chunk if isinstance(chunk, str) else json.dumps(chunk)
                self.wfile.write(f"data: {data}\n\n".encode())

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = ScriptedServer(f"http://127.0.0.1:{http.server_address[1]}", list(answers))
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def scrambled_model(folder: Path) -> Path:
    """The shipped model with the numbers of each matrix shuffled: it can do nothing, and its text goes on and on."""
    shutil.copytree(demo.CHECKPOINT, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    random = np.random.default_rng(0)
    for name, tensor in json.loads(data[8:begin]).items():
        if name != "__metadata__" and len(tensor["shape"]) > 1:
            assert tensor["dtype"] in ("BF16", "F16")
            first, end = tensor["data_offsets"]
            random.shuffle(np.frombuffer(data, np.uint16, (end - first) // 2, begin + first))
    path.write_bytes(data)
    return folder
