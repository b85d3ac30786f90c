"""The packages of a script: resolved and unpacked by the real uv, from wheels in a folder here."""

import hashlib
import io
import os
import resource
import sys
import tarfile
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import folders, judge, look
from launcher.look import OpenMachines
from launcher.machines.local import LocalNode
from launcher.plan import layer
from launcher.plan.code import Delivery
from launcher.plan.layer import Environment
from launcher.plan.requirements import read_requirements
from launcher.plan.sending import with_layer
from launcher.program import Needs, Program
from launcher.watch import guards
from tests.unit.launcher.launcher_values import VERSIONS, codes, facts, host

THERE = {"torch": "2.15.0", "nvidia-cublas": "13.2", "base": "1.0"}
ENVIRONMENT = Environment.from_facts("3.11.2", 36, THERE)


def wheel(folder, name, version, needs=(), tag="py3-none-any", files=None):
    """A wheel of one module, which says its version."""
    stem = f"{name}-{version}"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    about += "".join(f"Requires-Dist: {one}\n" for one in needs)
    made = f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n"
    inside = files or {f"{name}.py": f"version = {version!r}\n"}
    inside.update({f"{stem}.dist-info/METADATA": about, f"{stem}.dist-info/WHEEL": made})
    listed = "".join(f"{one},,\n" for one in [*inside, f"{stem}.dist-info/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w", zipfile.ZIP_DEFLATED) as file:
        for one, text in {**inside, f"{stem}.dist-info/RECORD": listed}.items():
            file.writestr(one, text)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Where uv looks instead of the internet, by pip's own settings; what was made once is kept for
    all these tests."""
    folder = tmp_path_factory.mktemp("index")
    wheel(folder, "tool", "1.0", ["base", "torch>=2", "part"])
    wheel(folder, "part", "0.5")
    wheel(folder, "base", "9.0")
    wheel(folder, "old", "1.0", ["torch<2"])
    wheel(folder, "newer", "1.0", ["base>=2"])
    wheel(folder, "native", "1.0", tag="cp311-cp311-manylinux_2_28_x86_64")
    wheel(folder, "native", "2.0", tag="cp311-cp311-manylinux_2_34_x86_64")
    wheel(folder, "native", "1.5", tag="cp311-cp311-manylinux_2_28_aarch64")
    wheel(folder, "nvidia_other", "1.0")
    wheel(folder, "user", "1.0", ["nvidia-other"])
    wheel(folder, "nvidia_ml_py", "13.0")
    wheel(folder, "reader", "1.0", ["nvidia-ml-py"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setattr(layer, "CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(layer, "BUNDLE", tmp_path_factory.mktemp("bundle"))
        yield folder


@pytest.fixture
def asks(tmp_path):
    """asks("tool", "part==0.5") -> what a requirements.txt of these lines asks for."""

    def write(*lines):
        path = tmp_path / "requirements.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        return read_requirements(path)

    return write


def test_a_second_launcher_waits_and_finds_the_layer_made(asks, tmp_path, monkeypatch):
    made_by, make = [], layer.make_layer

    def make_slowly(*words):
        made_by.append(words)
        time.sleep(0.2)  # in which the other would begin, too
        return make(*words)

    monkeypatch.setattr(layer, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(layer, "make_layer", make_slowly)
    wanted = asks("")
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(layer.build_layer, wanted, ENVIRONMENT) for _ in range(2)]
        assert made[0].result() == made[1].result()
    assert len(made_by) == 1


def test_a_disk_that_takes_no_layer_is_a_sentence(asks, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(layer, "CACHE", tmp_path / "file/cache")
    with pytest.raises(UserError, match=r"could not be stored: .*/file/cache: Not a directory"):
        layer.build_layer(asks("tool"), ENVIRONMENT)


def test_a_second_use_asks_uv_nothing(index, asks, monkeypatch, tmp_path):
    monkeypatch.setattr(layer, "BUNDLE", tmp_path)  # another test may have put the layer there
    first = layer.build_layer(asks("tool"), ENVIRONMENT)
    monkeypatch.setattr(layer.subprocess, "Popen", lambda *_, **__: pytest.fail("uv was asked"))
    assert layer.build_layer(asks("tool"), ENVIRONMENT) == first
    with pytest.raises(pytest.fail.Exception):  # another Python is another layer
        layer.build_layer(asks("tool"), Environment.from_facts("3.12.1", 36, THERE))
    module, text = first.tree / "tool.py", (first.tree / "tool.py").read_text()
    module.write_text("changed")
    with pytest.raises(pytest.fail.Exception):  # and so is what somebody changed
        layer.build_layer(asks("tool"), ENVIRONMENT)
    module.write_text(text)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("old", "old depend on torch<2 and torch==2.15.0, we can conclude"),
        ("user", "would bring nvidia-other 1.0, and only the stack brings torch and CUDA"),
        ("nothing-like-it", "nothing-like-it was not found"),
    ],
)
def test_what_cannot_be_is_refused_by_name(index, asks, line, said):
    before = list(layer.CACHE.glob("*/layer.json"))
    with pytest.raises(UserError) as refused:
        layer.build_layer(asks(line), ENVIRONMENT)
    assert said in str(refused.value)
    assert "requirements.txt" in str(refused.value)
    assert "+stack" not in str(refused.value)
    assert list(layer.CACHE.glob("*/layer.json")) == before


def test_a_layer_is_made_again_after_its_packages_changed_on_the_machines(
    index, asks, monkeypatch, tmp_path
):
    """Else every machine would lack what the old layer needs, whatever its user provisions."""
    monkeypatch.setattr(layer, "CACHE", tmp_path)
    layer.build_layer(asks("tool"), ENVIRONMENT)
    there = {**THERE, "base": "2.0"}
    made = layer.build_layer(asks("tool"), Environment.from_facts("3.11.2", 36, there))
    assert made.differs(there) == []


def test_the_reader_of_the_driver_s_figures_is_no_part_of_the_stack(index, asks):
    made = layer.build_layer(asks("reader"), ENVIRONMENT)
    assert (made.tree / "nvidia_ml_py.py").is_file()


def test_a_newer_package_lies_above_the_environments_and_a_wheel_for_a_newer_system_does_not(
    index, asks
):
    found = layer.build_layer(asks("newer", "native"), ENVIRONMENT).packages
    assert found == {"newer": "1.0", "base": "9.0", "native": "1.0"}
    with pytest.raises(UserError, match="native have no wheels with a matching Python"):
        layer.build_layer(asks("native"), Environment.from_facts("3.9", 28, THERE))


def test_packages_are_those_of_the_machines_processor(index, asks):
    on_x86 = layer.build_layer(asks("native"), ENVIRONMENT).packages
    arm = replace(ENVIRONMENT, architecture="aarch64")
    on_arm = layer.build_layer(asks("native"), arm).packages
    assert (on_x86, on_arm) == ({"native": "1.0"}, {"native": "1.5"})


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_hashes_are_held(index, asks, tmp_path):
    """Those of constraints, too; and a file with hashes names everything, as with pip."""
    part = f"part==0.5 --hash=sha256:{sha256_of(index / 'part-0.5-py3-none-any.whl')}"
    tool = f"tool==1.0 --hash=sha256:{sha256_of(index / 'tool-1.0-py3-none-any.whl')}"
    assert layer.build_layer(asks(part, "base<2"), ENVIRONMENT).packages == {"part": "0.5"}
    with pytest.raises(UserError, match="has hashes, but not for part"):
        layer.build_layer(asks(tool), ENVIRONMENT)
    (tmp_path / "limits.txt").write_text(f"part==0.5 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(UserError, match=r"[Hh]ash mismatch"):
        layer.build_layer(asks("tool", "-c limits.txt"), ENVIRONMENT)
    (tmp_path / "limits.txt").write_text("part<0.5\nunused==1\n")
    with pytest.raises(UserError, match=r"part<0\.5"):
        layer.build_layer(asks(tool, part, "-c limits.txt"), ENVIRONMENT)


def test_what_was_gathered_needs_no_index(index, asks, tmp_path, monkeypatch):
    wanted = asks("tool")
    tree = layer.build_layer(wanted, ENVIRONMENT, layer.BUNDLE).tree
    # What the environment has is not taken again.
    assert {path.stem for path in tree.glob("*.py")} == {"tool", "part"}
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(layer, "CACHE", tmp_path / "cache")
    made = layer.build_layer(wanted, ENVIRONMENT)
    assert made.packages == {"tool": "1.0", "part": "0.5"} and {"tool", "part"} <= made.modules()


def test_layers_that_nobody_used_are_thrown_away(index, asks):
    old, past = layer.CACHE / "old", time.time() - 31 * 86400
    old.mkdir()
    os.utime(old, (past, past))
    used = layer.build_layer(asks("tool"), ENVIRONMENT)
    os.utime(used.tree.parent, (past, past))
    assert layer.build_layer(asks("tool"), ENVIRONMENT) == used  # which renews it
    assert used.tree.exists() and not old.exists()


def test_machines_get_the_same_files_once(index, asks, tmp_path):
    made = layer.build_layer(asks("tool"), ENVIRONMENT)
    said, hosts = [], []
    for number in (1, 2):
        node_dir = str(tmp_path / f"node{number}")
        hosts.append(host(number, connection="local", node_dir=node_dir, env_python=sys.executable))
    known = {one.name: facts(n) for n, one in enumerate(hosts, 1)}
    machines = OpenMachines(hosts, {one.name: LocalNode(one) for one in hosts}, known)
    sent = [Delivery(made.code(), f"packages {made.summary()} go to")]
    guards.deliver(sent, machines, said.append)
    there = tmp_path / "node1" / made.folder
    assert (there / "tool.py").read_text() == "version = '1.0'\n"
    stale = tmp_path / "node1/layers/stale"
    stale.mkdir()
    past = time.time() - 32 * 86400
    os.utime(stale, (past, past))
    guards.deliver(sent, machines, said.append)
    assert said == ["packages tool 1.0, part 0.5 go to node1, node2"]
    assert not stale.exists() and there.exists()
    (there / "tool.py").write_text("changed")
    guards.deliver(sent, machines, said.append)
    assert said[1:] == ["packages tool 1.0, part 0.5 go to node1"]


def judged(program, *environments):
    known = {f"node{n}": facts(n, **one) for n, one in enumerate(environments, 1)}
    machines = OpenMachines([host(n) for n, _ in enumerate(known, 1)], {}, known)
    asked = Needs(Config(data=""), with_layer(program, machines))
    with mock.patch.object(
        layer, "build_layer", side_effect=AssertionError("a look makes no layer")
    ):
        for _ in range(2):
            with_layer(program, machines)
            wrong = judge.find_problems(machines, asked, look.ControlFacts(folders.disk_free()))
    return wrong


def test_environments_that_differ_get_no_layer(index, asks):
    script = Program("train", "SCRIPT=train.py", (), modules=("tool",), requirements=asks("tool"))
    same = {"distributions": THERE}
    assert judged(script, same, same) == []
    lacks = {"distributions": {**THERE, "base": "1.1"}}
    (problem,) = judged(script, same, lacks)
    assert (problem.code, problem.labels) == ("script-stack", ("node2 (192.0.2.2)",))
    newer = {**same, "versions": {**VERSIONS, "python": "3.12.1"}}
    assert codes(judged(script, same, newer)) == ["python-differs"]


def source(folder, name):
    """An sdist of this name which leaves a file beside it when it is built."""
    inside = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "backend.py": f"open({str(folder / f'{name} ran')!r}, 'w')\n",
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\n"
        "backend-path = ['.']\n",
    }
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        for one, text in inside.items():
            entry = tarfile.TarInfo(f"{name}-1.0/{one}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A project's own folder of packages, served over loopback too: the folder, its address, and
    the paths that were asked for."""
    folder, paths = tmp_path_factory.mktemp("sources"), []
    source(folder, "evil")
    wheel(folder, "leads", "1.0", [f"evil @ {(folder / 'evil-1.0.tar.gz').as_uri()}"])

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            paths.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "lines",
    [
        ["evil", "--no-binary evil", "--find-links {folder}"],
        ["\ufeff--no-binary evil", "evil", "--find-links {folder}"],
        ["--pre # newest \\", "--no-binary evil", "evil", "--find-links {folder}"],
        ["evil", "--only-binary :none:", "--no-index --find-links={folder}"],
        ["evil @ {url}/evil-1.0.tar.gz"],
        ["evil @ git+{url}/evil"],
        ["leads", "--find-links {folder}"],  # a wheel whose own metadata name the source
    ],
)
def test_no_line_of_a_project_has_anything_built_here(index, asks, sources, lines):
    folder, url, _ = sources
    (folder / "evil ran").unlink(missing_ok=True)
    with pytest.raises(UserError) as refused:
        wanted = asks(*(line.format(folder=folder, url=url) for line in lines))
        layer.build_layer(wanted, ENVIRONMENT)
    assert not (folder / "evil ran").exists()
    assert any(name in str(refused.value) for name in ("evil", "--only-binary :none:"))


def test_no_variable_reaches_a_project_s_author(index, asks, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"index-url https://192\.0\.2\.1/\$\{HF_TOKEN\}"):
        asks("tool", "--extra-index-url https://192.0.2.1/${HF_TOKEN}")
    asks("tool  # needs ${HF_TOKEN}")
    # Nor by the metadata of a wheel, in whose addresses uv replaces variables in capitals.
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@192.0.2.1")
    uv = tmp_path / "uv"
    uv.write_text(
        '#!/bin/sh\nenv | grep -E "^[A-Z0-9_]+=" >&2; env | grep -c proxy=.*secret >&2; exit 1'
    )
    uv.chmod(0o755)
    monkeypatch.setattr(layer.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"\b1:") as failed:
        layer.build_layer(asks("# nothing"), ENVIRONMENT)
    assert "UV_CACHE_DIR" in str(failed.value) and "secret" not in str(failed.value)


def test_a_file_s_own_index_holds_in_each_step(index, asks, sources, monkeypatch):
    _, url, paths = sources
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    made = layer.build_layer(asks("part", "--no-index"), ENVIRONMENT)
    assert (made.packages, paths) == ({"part": "0.5"}, [])


def test_a_small_wheel_does_not_fill_the_disk(index, asks, monkeypatch):
    wheel(index, "bomb", "1.0", files={"bomb.bin": bytes(60 << 20)})
    monkeypatch.setattr(layer, "MAX_BYTES", 6 << 20)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock
    with pytest.raises(UserError, match="need more than 6 MiB"):
        layer.build_layer(asks("bomb"), ENVIRONMENT)
    blocks = resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock - before
    assert blocks * 512 < 40 << 20


def test_of_a_name_that_no_package_has_no_file_is_made():
    names = {"../../x": "1", "a\nb": "1", "": "1", "-r": "1", "Real_Name.x": "2"}
    assert Environment.from_facts("3.11", 36, names).packages == (("real-name-x", "2"),)
