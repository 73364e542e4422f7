"""A server of the part of the Hub's API that jpipe uses, on the loopback interface. Its answers can be wrong on purpose."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"
LARGE = (".safetensors", ".parquet")  # as Git LFS stores them


@dataclass
class Repo:
    """The commits of a repository, by hash, and the commits of its branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {branch}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha


class Hub:
    """The server.

    Attributes:
        repos: the repositories, by `models/owner/name` or `datasets/owner/name`.
        requests: method and path of each request.
        wrong: names of files that have other bytes than the Hub says.
        cut: names of files that break off in the middle, and how often they still do.
        down: the status of every answer while the server is out of order.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.wrong: set[str] = set()
        self.cut: dict[str, int] = {}
        self.down: int | None = None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, name: str, files: dict[str, bytes], **keys: bool) -> str:
        """Add a commit to the main branch of a repository."""
        repo = self.repos.setdefault(name, Repo())
        vars(repo).update(keys)
        return repo.commit(files)

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded, in order."""
        return [request.rpartition("/")[2] for request in self.requests if request.startswith("GET") and "/resolve/" in request]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.down is not None:
            return self.send(self.hub.down, {})
        if path == "/api/whoami-v2":
            return self.send(200, {"name": "me"}) if self.is_logged_in else self.fail(401, "", "Invalid token")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"models/{asked.get('organization') or 'me'}/{asked['name'].rpartition('/')[2]}"
            self.hub.repos.setdefault(name, Repo(private=asked.get("visibility") == "private" or asked.get("private", False)))
            return self.send(200, {"url": f"{self.hub.url}/{name.removeprefix('models/')}"})
        if match := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(/.*)?", path):
            return self.api(match[1], match[2] or "/revision/main", body)
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.file(f"{match[1] or 'models/'}{match[2]}", match[3], match[4])
        return self.fail(404, "", "no such page")

    @property
    def is_logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def found(self, name: str) -> Repo | None:
        """Return a repository that this request may see, or answer that there is none."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self.is_logged_in):
            self.fail(404 if self.is_logged_in else 401, "RepoNotFound", "Repository not found")
            return None
        if repo.gated and not self.is_logged_in:
            self.fail(401, "GatedRepo", "Access to this model is restricted")
            return None
        return repo

    def api(self, name: str, rest: str, body: bytes) -> None:
        if (repo := self.found(name)) is None:
            return None
        _, action, revision = rest.split("/", 2)
        if action == "preupload":
            files = json.loads(body)["files"]
            answer = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self.send(200, {"files": answer})
        if action == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            files = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"}
            sha = repo.commit(files, revision)
            return self.send(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha, "hookOutput": ""})
        sha = repo.branches.get(revision, revision)
        if action == "revision":
            known = sha in repo.commits or (revision == "main" and not repo.commits)
            about = {
                "id": name.partition("/")[2],
                "sha": sha,
                "private": repo.private,
                "siblings": [],
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            return self.send(200, about) if known else self.fail(404, "RevisionNotFound", "Invalid rev id")
        if sha not in repo.commits:
            return self.fail(404, "RevisionNotFound", "Invalid rev id")
        return self.send(200, [self.entry(path, content) for path, content in repo.commits[sha].items()])

    def entry(self, path: str, content: bytes) -> dict:
        large = {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}
        return {"type": "file", "path": path, "size": len(content), "oid": git_hash(content), **(large if path.endswith(LARGE) else {})}

    def file(self, name: str, sha: str, path: str) -> None:
        if (repo := self.found(name)) is None:
            return
        content = repo.commits.get(sha, {}).get(path)
        if content is None:
            return self.fail(404, "EntryNotFound", "Entry not found")
        large = path.endswith(LARGE)
        tag = hashlib.sha256(content).hexdigest() if large else git_hash(content)
        sent = bytes(byte ^ 1 for byte in content) if path in self.hub.wrong else content
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(match[1])
        self.send_response(206 if start else 200)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{tag}"', "Accept-Ranges": "bytes", "Content-Length": str(len(sent) - start)}
        headers |= {"X-Linked-Etag": f'"{tag}"', "X-Linked-Size": str(len(sent))} if large else {}
        headers |= {"Content-Range": f"bytes {start}-{len(sent) - 1}/{len(sent)}"} if start else {}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut.get(path, 0) > 0:
            self.hub.cut[path] -= 1
            self.wfile.write(sent[start : start + max(1, (len(sent) - start) // 2)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(sent[start:])

    def send(self, status: int, content: object, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str, message: str) -> None:
        self.send(status, {"error": message}, **{"X-Error-Code": code, "X-Error-Message": message})


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
