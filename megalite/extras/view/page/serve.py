"""A page made anew at every visit, and the lines that metrics.jsonl gets meanwhile, for browsers of this host."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megalite.core.base.errors import UserError, require
from megalite.extras.view.metrics import parse_line
from megalite.extras.view.page.embed import to_json
from megalite.runtime.base.untrusted import BadFile, require_regular
from megalite.runtime.record.metrics import METRICS_FILE

# Bytes of metrics.jsonl in one answer, and of the whole file.
_MOST_BYTES, _LARGEST = 4 << 20, 4 << 30


class Server(ThreadingHTTPServer):
    """Serves a page below a path that nobody can guess, and only by the names of this host.

    A page of another origin could reach a server on 127.0.0.1, by its address or by a name of its own that resolves to
    it: the first does not know the path, the second sends its own name as Host.

    Args:
        runs: folders of the runs.
        make_page: makes the page; called in one thread at a time.
        port: 0 for any.
        hide: as for `page`.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], make_page: Callable[[], str], port: int, hide: str | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.runs, self._make_page, self.hide = list(runs), make_page, hide
        self._one_at_a_time = threading.Lock()
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self.url = f"http://127.0.0.1:{self.server_port}{self.path}"
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    def make_page(self) -> str:
        """Make the page."""
        with self._one_at_a_time:
            return self._make_page()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that leaves before it has the page is no error.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if self.headers.get("Host") not in self.server.hosts:
            self.send_error(403)
        elif url.path == self.server.path:
            self._answer(self.server.make_page(), "text/html; charset=utf-8")
        elif url.path == f"{self.server.path}data":
            try:
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                number, after = int(query["run"]), int(query["after"])
                run = self.server.runs[number] if number >= 0 and after >= 0 else None
            except (KeyError, ValueError, IndexError):
                run = None
            if run is None:
                self.send_error(404)
            else:
                told = new_lines(run / METRICS_FILE, query.get("file", ""), after)
                self._answer(to_json(told, self.server.hide), "application/json")
        else:
            self.send_error(404)

    def _answer(self, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(200)
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return


def new_lines(path: Path, file: str, after: int) -> dict[str, Any]:
    """Return the whole lines of a file that is only appended to, from a byte on.

    Args:
        path: the file.
        file: its inode, as text, when the byte was told.
        after: the byte.

    Returns:
        {"offset": byte of the next line, "lines": objects}, or {"again": true}: it is another file, or shorter.
    """
    try:
        require_regular(path, _LARGEST)
        with path.open("rb") as f:
            status = os.fstat(f.fileno())
            if str(status.st_ino) != file or status.st_size < after:
                return {"again": True}
            f.seek(after)
            data = f.read(_MOST_BYTES)
    except (OSError, BadFile):
        # Not there yet, or just being replaced.
        return {"again": True} if file not in ("", "0") else {"offset": after, "lines": []}
    end = data.rfind(b"\n") + 1
    lines = [parse_line(line) for line in data[:end].splitlines()]
    return {"offset": after + end, "lines": [line for line in lines if line]}


def serve(runs: Sequence[Path], make_page: Callable[[], str], port: int, hide: str | None = None) -> None:
    """Serve until Ctrl-C; arguments as for `Server`.

    Raises:
        UserError: the port is taken, or is none.
    """
    require(0 <= port < 65536, f"--serve {port}", "must be a port", "drop the number for any free one")
    try:
        server = Server(runs, make_page, port, hide)
    except OSError as e:
        rule = f"cannot be used ({e.strerror})"
        raise UserError(f"--serve {port}", rule, "drop the number for any free one") from None
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
