"""A real object store on this machine: moto's server, which speaks S3, and a proxy that breaks what passes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import http.server
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from tests.ranks import reserve_port

# Looked for in everything that the tests of stores leave.
KEY_ID, SECRET = "AKIAMEGALITETEST0001", "sEcReT/of+megalite0123456789abcdefghijkl"
TOKEN = "tOkEn/of+a+session//megalite0123456789=="


@dataclass
class S3:
    """A server, and the environment that leads to it.

    Attributes:
        port: where it listens on 127.0.0.1.
        process: the server.
        log: what it says.
        bucket: name of a bucket that exists.
    """

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    bucket: str = "bucket"

    def url(self, name: str) -> str:
        """A URL in the bucket."""
        return f"s3://{self.bucket}/{name}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def environment(port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """What the store's own tools read."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": host,
    }


def secrets_in(left: Path | bytes) -> list[str]:
    """The credentials of these tests that a file or a text holds: as they are, quoted for a URL, or in base64."""
    if isinstance(left, Path):
        try:
            left = left.read_bytes() if left.is_file() else b""
        except FileNotFoundError:  # a process that the test leaves to itself removes files
            return []
    found = []
    for secret in (KEY_ID, SECRET, TOKEN):
        # Three texts, as the secret may begin at any of three places of a group.
        encoded = [base64.b64encode(b"." * i + secret.encode())[4:-4] for i in range(3)]
        if any(form in left for form in (secret.encode(), urllib.parse.quote(secret, "").encode(), *encoded)):
            found.append(secret)
    return found


def start_s3(log: Path) -> S3:
    """Start a server with an empty bucket; it writes to a log."""
    port = reserve_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as f:
        process = subprocess.Popen(command, stdout=f, stderr=f, env={**os.environ, **environment(port)})
    s3 = S3(port, process, log)
    deadline = time.monotonic() + 240
    while True:
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{s3.bucket}", method="PUT")
            urllib.request.urlopen(request).close()
            return s3
        except OSError as e:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"moto did not start ({e}): {log.read_text()[-2000:]}") from None
            time.sleep(0.05)


def fits(body: bytes, headers: Message) -> bool:
    """Whether a body has the checksums that a request names, as S3 checks them; moto does not."""
    crc = base64.b64encode(struct.pack(">I", zlib.crc32(body))).decode()
    digests = {
        "x-amz-content-sha256": hashlib.sha256(body).hexdigest(),
        "x-amz-checksum-crc32": crc,
        "content-md5": base64.b64encode(hashlib.md5(body).digest()).decode(),
    }
    return all(headers.get(name, value) in (value, "UNSIGNED-PAYLOAD") for name, value in digests.items())


@dataclass
class Fault:
    """What a proxy breaks.

    Attributes:
        match: pattern of "METHOD /path?query".
        kind: "200", "503", "403" or "507" (answered so, nothing passes), "hang" (never answered), "cut" (half of the
            answer), "cut-request" (the connection is closed in the middle of what is sent), "short" (an answer without
            its last byte), "corrupt" (another byte in the middle of the answer), "replay" (the first answer again and
            again), "drip" (an answer in drops), "slow" (passed on after `seconds`),
            "corrupt-request" (another byte in the middle of what is sent: refused if a checksum came with it),
            "call-before" and "call-after" (`action` is called with it after half of the request, or when the server has
            answered it, and nothing is answered).
        times: how often.
        seconds: see "slow".
        skip: how many matching requests pass before the first that is broken.
        action: see "call-before".
        happened: how often it has.
    """

    match: str
    kind: str
    times: int = 1 << 30
    skip: int = 0
    seconds: float = 0.0
    action: Callable[[str], None] = lambda line: None
    happened: int = 0
    first: tuple[int, list[tuple[str, str]], bytes] | None = None


class BreakingProxy:
    """Stands between a client and a server on this machine, and breaks what its faults name.

    Attributes:
        faults: the first that matches a request and is not used up happens.
        requests: "METHOD /path?query" of all that came, in order.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.target, self.faults, self.requests = port, list[Fault](), list[str]()
        proxy, self.closing, self.choosing = self, threading.Event(), threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer((host, 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def handle(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """Pass a request on, or not."""
        line = f"{request.command} {request.path}"
        self.requests.append(line)
        with self.choosing:
            fault = next((f for f in self.faults if f.happened < f.times and re.search(f.match, line)), None)
            if fault is not None and fault.skip:
                fault.skip -= 1
                fault = None
            elif fault is not None:
                fault.happened += 1
        kind = fault.kind if fault is not None else ""
        size = int(request.headers.get("Content-Length", 0))
        if kind == "hang":
            self.closing.wait()
            return
        if kind == "slow" and fault is not None:
            self.closing.wait(fault.seconds)
        if kind in ("cut-request", "call-before"):
            request.rfile.read(size // 2)
            if fault is not None:
                fault.action(line)
            self.hang_up(request)
            return
        body = request.rfile.read(size)
        if kind == "corrupt-request" and body:
            body = body[: size // 2] + bytes([body[size // 2] ^ 1]) + body[size // 2 + 1 :]
            if not fits(body, request.headers):
                text = b"<Error><Code>BadDigest</Code><Message>The checksum did not match.</Message></Error>"
                self.send(request, 400, [("Content-Type", "application/xml")], text, len(text))
                return
        if kind in ("503", "403", "507"):
            code = {"503": "SlowDown", "403": "AccessDenied", "507": "QuotaExceeded"}[kind]
            # Some servers quote what they were given: the key's ID in the first, the token of a session in the second.
            given = [request.headers.get(name, "") for name in ("Authorization", "X-Amz-Security-Token")]
            text = f"<Error><Code>{code}</Code><Message>{code} for {' '.join(given)}</Message></Error>".encode()
            self.send(request, int(kind), [("Content-Type", "application/xml")], text, len(text))
            return
        if kind == "200":
            self.send(request, 200, [], b"", 0)
            return
        if kind == "replay" and fault is not None and fault.first is not None:
            self.send(request, *fault.first, len(fault.first[2]))
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=60)
        connection.request(request.command, request.path, body, dict(request.headers))
        response = connection.getresponse()
        data = response.read()
        headers = [(k, v) for k, v in response.getheaders() if k.lower() not in ("content-length", "transfer-encoding")]
        length = int(response.getheader("Content-Length") or len(data))
        connection.close()
        if fault is not None and kind == "call-after":
            fault.action(line)
            self.hang_up(request)
            return
        if fault is not None and kind == "replay":
            fault.first = (response.status, headers, data)
        if kind == "short":
            data, length = data[:-1], length - 1
        if kind == "corrupt":
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        if kind in ("short", "corrupt"):
            headers = [(k, v) for k, v in headers if "checksum" not in k.lower()]
        now = {"cut": len(data) // 2, "drip": 0}.get(kind, len(data))
        self.send(request, response.status, headers, data[:now], length)
        if kind == "drip":
            with contextlib.suppress(OSError):  # the other side has given up
                for at in range(len(data)):
                    request.wfile.write(data[at : at + 1])
                    if self.closing.wait(0.05):
                        break
            request.close_connection = True
        if kind == "cut":
            self.hang_up(request)

    @staticmethod
    def hang_up(request: http.server.BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):  # the other side may be dead
            request.connection.shutdown(socket.SHUT_RDWR)
        request.close_connection = True

    @staticmethod
    def send(
        request: http.server.BaseHTTPRequestHandler,
        status: int,
        headers: list[tuple[str, str]],
        data: bytes,
        length: int,
    ) -> None:
        request.send_response_only(status)
        for name, value in headers:
            request.send_header(name, value)
        request.send_header("Content-Length", str(length))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
