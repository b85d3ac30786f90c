"""Weights by name are fetched once by the control node, checked and kept; and timm goes along
where a machine lacks it."""

import hashlib
import http.server
import io
import threading

import pytest
import torchvision

from contract.errors import UserError
from contract.options import Config
from launcher.look import OpenMachines
from launcher.plan import layer, plan, pretrained
from launcher.plan.layer import Layer
from launcher.plan.sending import deliveries, fetch_files, with_layer
from launcher.programs import build_program
from launcher.terminal import Terminal
from tests.unit.launcher.launcher_values import CODE, facts, host
from trainer.classifiers import classifier_names

BYTES = b"the weights of a net" * 999
SHA256 = hashlib.sha256(BYTES).hexdigest()
TAG = "/timm/net.a1/resolve/main/model.safetensors"


class Server(http.server.BaseHTTPRequestHandler):
    """A store of files, and a hub that names the hash of a file and leads elsewhere for it."""

    asked, promised = [], SHA256

    def do_GET(self):
        self.asked.append(f"{self.command} {self.path}")
        if self.path == TAG:
            self.send_response(302)
            self.send_header("X-Linked-ETag", f'"{self.promised}"')
            self.send_header("Location", "/elsewhere/file")
            self.end_headers()
        elif self.path in (f"/net-{SHA256[:8]}.pth", "/net-00000000.pth", "/elsewhere/file"):
            self.answer(len(BYTES))
        elif self.path == "/cut-00000000.pth":
            self.answer(len(BYTES) + 1)
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def answer(self, length):
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(BYTES)

    def log_message(self, *_):
        pass


@pytest.fixture
def store(monkeypatch, tmp_path):
    """fetch(file of torchvision's, or none for timm's), from a server of this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    Server.asked.clear()
    Server.promised = SHA256
    monkeypatch.setattr(pretrained, "TORCH_MODELS", address)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr(pretrained, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(pretrained, "BUNDLE", tmp_path / "bundle")

    def fetch(file=None):
        table = tmp_path / "table.txt"
        table.write_text(f"net V1 {file}\n")
        monkeypatch.setattr(pretrained, "TABLE", table)
        named = {"model": "net", "weights": "torchvision:V1"}
        hub = {"model": "timm:net", "weights": "timm:a1"}
        program = build_program(Config(trainer=named if file else hub))
        (sent,) = fetch_files(program, Terminal(io.StringIO())).files
        return sent.path

    yield fetch
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("file", [f"net-{SHA256[:8]}.pth", None])
def test_a_file_is_fetched_once_and_again_only_where_it_was_damaged(store, tmp_path, file):
    path = store(file)
    assert path.read_bytes() == BYTES
    asked = len(Server.asked)
    assert store(file) == path and len(Server.asked) == asked
    path.write_bytes(BYTES[:-1])
    assert store(file) == path and len(Server.asked) == 2 * asked
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_a_file_without_end_is_cut_off(store, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "MAX_BYTES", len(BYTES) - 1)
    with pytest.raises(UserError, match="more than"):
        store(None)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("promised", [SHA256, ""])
def test_a_checksum_is_kept_and_said_and_a_mirror_without_one_is_named(
    store, monkeypatch, promised
):
    said = []
    monkeypatch.setattr(Terminal, "say", lambda _, text: said.append(text))
    Server.promised = promised
    assert store(None).name == f"net.a1-{SHA256}.safetensors"
    assert SHA256 in said[-1] and ("published no checksum" in said[-1]) == (not promised)


def test_one_of_the_bundle_needs_no_server(store, monkeypatch, tmp_path):
    store(None)
    (tmp_path / "cache").rename(tmp_path / "bundle")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert store(None).parent == tmp_path / "bundle"


@pytest.mark.parametrize(
    "file, why",
    [
        ("net-00000000.pth", "sent an unexpected file"),
        ("cut-00000000.pth", "bytes arrived"),
        ("gone-00000000.pth", "no such file"),
    ],
)
def test_what_is_not_the_file_is_a_sentence_and_nothing_is_kept(store, tmp_path, file, why):
    with pytest.raises(UserError, match=why) as told:
        store(file)
    assert "WEIGHTS=torchvision:V1" in str(told.value) and file in str(told.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_hub_s_hash_counts(store, tmp_path):
    Server.promised = "0" * 64
    with pytest.raises(UserError, match="sent an unexpected file"):
        store(None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_where_nothing_can_be_reached_that_is_said_with_what_to_do(store, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="make bundle MODEL=timm:net WEIGHTS=timm:a1"):
        store(None)


@pytest.mark.parametrize(
    "model, weights, said",
    [
        ("resnet18", "torchvision:V9", "torchvision:IMAGENET1K_V1"),
        ("timm:resnet18", "torchvision:IMAGENET1K_V1", "has none for MODEL=timm:resnet18"),
        ("resnet18", "timm:a1_in1k", "MODEL=timm:resnet50"),
        ("timm:resnet18", "timm:../../x", "MODEL=timm:resnet50"),
    ],
)
def test_names_that_are_none_are_refused_before_any_machine_is_asked(model, weights, said):
    with pytest.raises(UserError, match=said):
        build_program(Config(trainer={"model": model, "weights": weights}))


def test_timm_goes_to_machines_that_lack_it_and_their_ranks_find_it(monkeypatch, tmp_path):
    """If all have it, nothing is sent."""
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm/__init__.py").write_text("")
    sent = Layer(tmp_path, "ab" * 32, {"timm": "1.0"}, {})
    monkeypatch.setattr(layer, "build_layer", lambda *_: sent)
    config = Config(trainer={"model": "timm:net", "per_node_batch_size": 8})
    hosts, paths = [host(1), host(2)], []
    for missing in (["timm"], []):
        known = {h.name: facts(n, missing=missing) for n, h in enumerate(hosts, 1)}
        program = with_layer(build_program(config), OpenMachines(hosts, {}, known))
        request = plan.PlanRequest(run="r", unix=0.0, options=config, program=program, code=CODE)
        made = plan.build(hosts, known, request)
        paths.append([node.env.get("PYTHONPATH") for node in made.nodes])
        codes = [one.code for one in deliveries(program) if one.code.kind == layer.FOLDER]
        assert len(codes) == len(missing)
    assert all(path.endswith(sent.folder) for path in paths[0]) and paths[1] == [None, None]


def test_the_table_of_torchvision_s_weights_is_its_own():
    rows = [line.split() for line in pretrained.TABLE.read_text().splitlines() if line[0] != "#"]
    own = {
        (name, weights.name): weights
        for name in classifier_names()
        for weights in torchvision.models.get_model_weights(name)
    }
    ours = {
        (model, name): f"https://download.pytorch.org/models/{file}" for model, name, file in rows
    }
    assert len(ours) == len(rows) > 100
    assert ours == {key: own[key].url for key in ours}
    without = {model for model, _ in own.keys() - ours.keys()}
    assert without == {"efficientnet_v2_l", "googlenet", "inception_v3", "vgg16"}
    assert not any(own[key].transforms.keywords.get("mean") for key in ours)
