"""A stand-in for the Hugging Face Hub with the HTTP API of an upload; the client is the real one."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_" + "a" * 30  # as long as a real one, and nobody's
OWNER = "me"


class LocalHub:
    """A local Hub.

    repositories: {owner/name: {"private": flag of the request, "files": {path: content}}}. refuses: status of every commit; None to accept.
    """

    def __init__(self, refuses: int | None = None):
        self.repositories: dict[str, dict] = {}
        self.large: dict[str, bytes] = {}
        self.refuses = refuses
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub.asked.append(f"POST {self.path}")
                status, answer = (401, {"error": "who are you?"})
                if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                    status, answer = hub.answer(self.path, body)
                self.send(status, answer)

            def do_PUT(self):
                hub.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
                self.send(200, {})

            def send(self, status, answer):
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> tuple[int, dict]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or OWNER}/{asked['name']}"
            if not name.startswith(f"{OWNER}/"):
                return 403, {"error": "not yours"}
            known = name in self.repositories
            self.repositories.setdefault(name, {"visibility": asked.get("visibility"), "files": {}})
            return 409 if known else 200, {"url": f"{self.address}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [
                {**one, "actions": {"upload": {"href": f"{self.address}/large/{one['oid']}"}}} for one in objects
            ]}  # fmt: skip
        name = path.removeprefix("/api/models/").split("/preupload/")[0].split("/commit/")[0]
        if name not in self.repositories:
            return 404, {"error": "no such repository"}
        if "/preupload/" in path:
            files = [one["path"] for one in json.loads(body)["files"]]
            large = (".safetensors", ".png")
            return 200, {
                "files": [{"path": p, "uploadMode": "lfs" if p.endswith(large) else "regular", "shouldIgnore": False} for p in files]
            }
        if self.refuses is not None:
            return self.refuses, {"error": "no room"}
        for line in map(json.loads, body.splitlines()):
            value, files = line["value"], self.repositories[name]["files"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
                assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
        return 200, {"commitUrl": f"{self.address}/{name}/commit/1", "commitOid": "1" * 40}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def use(patch, address: str, **environment: str) -> None:
    """Make the client in this process use the local Hub; it has read its environment at import. patch: pytest's monkeypatch."""
    from huggingface_hub import constants, hf_api

    asked = {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_TOKEN_PATH": "/nowhere", "HF_HUB_OFFLINE": "0"} | environment
    patch.setenv("HF_TOKEN", asked["HF_TOKEN"])
    patch.setattr(constants, "HF_TOKEN_PATH", asked["HF_TOKEN_PATH"])
    patch.setattr(constants, "ENDPOINT", asked["HF_ENDPOINT"])
    patch.setattr(constants, "HF_HUB_OFFLINE", asked["HF_HUB_OFFLINE"] == "1")
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(hf_api.api, "endpoint", asked["HF_ENDPOINT"])
