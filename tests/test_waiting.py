"""What comes from elsewhere is waited for in bounded time, and then there is one sentence."""

import http.server
import threading
import time

import pytest
from conftest import ROOT  # noqa: F401 (puts the root on the path)

from nanomdlm.support.data import sources


class Dribble(http.server.BaseHTTPRequestHandler):
    """Sends a byte now and then for three seconds, in its headers or in its body."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        if self.path == "/body":
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: " * (self.path == "/headers"))
        for _ in range(60):
            if self.server.end.wait(0.05):
                return
            self.wfile.write(b"x")
            self.wfile.flush()


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dribble) as server:
        server.end = threading.Event()
        server.handle_error = lambda *args: None  # a client that has gone
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.end.set()
        server.shutdown()


@pytest.mark.parametrize("where", ["headers", "body"])
def test_download_that_hardly_moves_is_given_up(server, tmp_path, monkeypatch, where, capsys):
    monkeypatch.setattr(sources, "URL", f"http://127.0.0.1:{server.server_port}/{where}")
    monkeypatch.setattr(sources, "DOWNLOAD_LIMIT", 0.3, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(OSError, match=r"0\.3"):
        sources.shakespeare()
    assert time.monotonic() - began < 2.5
