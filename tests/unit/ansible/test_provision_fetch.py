"""Downloads that resume where they stopped, from a server in the test that counts what it sends."""

import hashlib
import http.server
import threading
import typing
import urllib.request

import pytest

from contract.errors import UserError
from tests.unit.ansible.provision_machines import load

fetch = load("ansible/bundle.py").fetch

CONTENT = bytes(range(256)) * 4096
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT from the byte that is asked for; under /plain always from the first."""

    sent: typing.ClassVar = []

    def do_GET(self):
        first = int(self.headers.get("Range", "bytes=0-")[6:-1])
        if self.path == "/plain":
            first = 0
        if first >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        self.end_headers()
        self.wfile.write(CONTENT[first:])
        self.sent.append(len(CONTENT) - first)

    def log_message(self, *_):
        pass


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(Server, "sent", [])
    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def wanted(url, tmp_path, digest=DIGEST):
    return fetch.File(url, tmp_path / "file", digest, len(CONTENT))


def get(file):
    fetch.fetch_all([file], "test", fetch.Progress())


@pytest.mark.parametrize(
    ("path", "there", "sent"),
    [
        ("/ranges", 0, [len(CONTENT)]),
        ("/ranges", 1000, [len(CONTENT) - 1000]),
        ("/ranges", len(CONTENT), []),
        ("/plain", 1000, [len(CONTENT)]),
    ],
)
def test_half_a_file_is_finished(url, tmp_path, capsys, path, there, sent):
    (tmp_path / "file.part").write_bytes(CONTENT[:there])
    get(wanted(url + path, tmp_path))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert Server.sent == sent and capsys.readouterr().out == "test: 1/1 file\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_whole_file_is_not_fetched_again_and_a_broken_one_is(url, tmp_path):
    for content, sent in ((CONTENT, []), (CONTENT[:-1] + b"x", [len(CONTENT)])):
        (tmp_path / "file").write_bytes(content)
        get(wanted(url, tmp_path))
        assert (tmp_path / "file").read_bytes() == CONTENT and Server.sent == sent
    (tmp_path / "file").unlink()
    with pytest.raises(UserError, match="its SHA-256 differs"):  # of another than was expected
        get(wanted(url, tmp_path, "0" * 64))
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"could not be downloaded: .*Run the same command again"):
        get(wanted("http://127.0.0.1:9/file", tmp_path))


def test_proxies_of_the_environment_are_used_unless_apt_has_one(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://environment.invalid:1")
    made, build = [], urllib.request.build_opener

    def noted(handler):
        made.append(handler.proxies["http"])
        return build(handler)

    monkeypatch.setattr(urllib.request, "build_opener", noted)
    fetch.fetch_all([], "test", fetch.Progress())
    fetch.fetch_all([], "test", fetch.Progress(), "http://apt.invalid:2")
    assert made == ["http://environment.invalid:1", "http://apt.invalid:2"]


def test_a_terminal_that_is_another_users_is_no_defect(tmp_path, capsys):
    """After `su` it may not be opened; a folder stands in for it, which nobody may write to."""
    progress = fetch.Progress(str(tmp_path))
    progress.begin("wheels")
    with progress.bar("wheels", 1) as advance:
        advance(1)
    assert capsys.readouterr().err.startswith("tandem: gathering wheels\n")
