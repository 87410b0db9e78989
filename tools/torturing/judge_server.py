"""HTTP endpoint for tools/torture.py that scores completions as an LLM judge and fails from its 50th request on.

    python tools/torturing/judge_server.py FILE HOW TIMES PORT

FILE receives the port number. HOW names the failure (empty: none), TIMES is the number of requests that fail, and PORT 0 selects a free
port. The module imports only the standard library, so that it starts fast.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FIRST_FAULTY_REQUEST = 50  # first request that fails: in the second rollout of 24 completions


class Handler(BaseHTTPRequestHandler):
    """Request handler of the judge.

    Attributes:
        how: Failure: an HTTP status, "word", "page", "endless", "silent", "slow", "drop" or "die".
        times: Number of requests that fail.
        asked: Number of requests so far.
    """

    how, times = "", 0
    asked, lock = 0, threading.Lock()

    def log_message(self, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        with self.lock:
            Handler.asked += 1
            is_rude = FIRST_FAULTY_REQUEST <= Handler.asked < FIRST_FAULTY_REQUEST + self.times
        if is_rude and self.how != "slow":
            return self._misbehave()
        if is_rude:
            time.sleep(3.0)  # this is the fault: a slow response
        tokens = [int(word) for word in text.partition("[Response]\n")[2].partition("\n")[0].split()]
        score = 10 * sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))
        self._respond(200, json.dumps({"choices": [{"message": {"content": f"Score: {score:.3f}"}}]}))

    def _respond(self, status: int, body: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def _misbehave(self) -> None:
        if self.how.isdigit():
            self._respond(int(self.how), "no", **({"Location": "http://127.0.0.2:9/"} if self.how == "302" else {}))
        elif self.how == "word":
            self._respond(200, json.dumps({"choices": [{"message": {"content": "splendid"}}]}))
        elif self.how == "page":
            self._respond(200, "<html>")
        elif self.how == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b"x" * 65536)
        elif self.how == "silent":
            time.sleep(600)
        elif self.how == "die":
            signal.raise_signal(signal.SIGKILL)
        self.close_connection = True


def main(told: str, how: str, times: str, port: str) -> None:
    """Serve until the process is killed.

    Args:
        told: Path of the file that receives the port.
        how: Failure, as in `Handler`.
        times: Number of requests that fail.
        port: Port; 0 selects a free one.
    """
    Handler.how, Handler.times = how, int(times)
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    server.daemon_threads = True
    Path(told).write_text(f"{server.server_address[1]}\n")
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
