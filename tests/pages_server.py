"""The built book served as GitHub Pages serves it: text compressed by gzip, everything else as it is.

python tests/pages_server.py [FOLDER] [PORT]      by default _build/html on port 8000, until interrupted
"""

from __future__ import annotations

import gzip
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COMPRESSED = {".html", ".css", ".js", ".json", ".svg", ".txt", ".xml"}


@cache
def compressed(path: Path, changed: float) -> bytes:
    return gzip.compress(path.read_bytes(), 6)


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    prefix = ""  # the path under which the folder is served, such as "/flce"

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.removeprefix(self.prefix))

    def send_error(self, code: int, *arguments: Any) -> None:
        page = Path(self.directory, "404.html")
        if code != 404 or not page.is_file():
            return super().send_error(code, *arguments)
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(page.stat().st_size))
        self.end_headers()
        self.wfile.write(page.read_bytes())

    def send_head(self) -> Any:
        path = Path(self.translate_path(self.path))
        if "gzip" not in self.headers.get("Accept-Encoding", "") or path.suffix not in COMPRESSED or not path.is_file():
            return super().send_head()
        body = compressed(path, path.stat().st_mtime)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=600")
        self.end_headers()
        return io.BytesIO(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(folder: Path, port: int = 0, prefix: str = "") -> Iterator[str]:
    """The address at which ``folder`` is served while the context lasts."""
    handler = type("Handler", (Handler,), {"prefix": prefix})
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(handler, directory=str(folder)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "_build" / "html"
    with served(folder, int(sys.argv[2]) if len(sys.argv) > 2 else 8000) as address:
        print(f"{folder} on {address}", flush=True)
        threading.Event().wait()
