"""The packages of a script: resolved and unpacked by the real uv, from wheels in a folder here."""

import hashlib
import io
import os
import sys
import tarfile
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import judge, look
from launcher.look import OpenMachines
from launcher.machines.local import LocalNode
from launcher.plan import layer
from launcher.plan.code import Delivery
from launcher.plan.layer import Environment
from launcher.watch import guards
from launcher.workload import Requirements
from launcher.workloads.script import Script
from tests.unit.launcher.launcher_values import VERSIONS, codes, facts, host

THERE = {"torch": "2.15.0", "nvidia-cublas": "13.2", "base": "1.0"}
ENVIRONMENT = Environment.of("3.11.2", 36, THERE)


def wheel(folder, name, version, needs=(), tag="py3-none-any", files=None):
    """A wheel of one module, which says its version."""
    stem = f"{name}-{version}"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    about += "".join(f"Requires-Dist: {one}\n" for one in needs)
    made = f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n"
    inside = files or {f"{name}.py": f"version = {version!r}\n"}
    inside.update({f"{stem}.dist-info/METADATA": about, f"{stem}.dist-info/WHEEL": made})
    listed = "".join(f"{one},,\n" for one in [*inside, f"{stem}.dist-info/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as file:
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setattr(layer, "CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(layer, "BUNDLE", tmp_path_factory.mktemp("bundle"))
        yield folder


@pytest.fixture
def asks(tmp_path):
    """asks("tool", "part==0.5") -> a requirements.txt."""

    def write(*lines):
        path = tmp_path / "requirements.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


def test_a_second_launcher_waits_and_finds_the_layer_made(asks, tmp_path, monkeypatch):
    made_by, make = [], layer._make

    def make_slowly(*words):
        made_by.append(words)
        time.sleep(0.2)  # in which the other would begin, too
        return make(*words)

    monkeypatch.setattr(layer, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(layer, "_make", make_slowly)
    wanted = asks("")
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(layer.of, wanted, ENVIRONMENT) for _ in range(2)]
        assert made[0].result() == made[1].result()
    assert len(made_by) == 1


def test_a_disk_that_takes_no_layer_is_a_sentence(asks, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(layer, "CACHE", tmp_path / "file/cache")
    with pytest.raises(UserError, match=r"could not be kept: .*/file/cache: Not a directory"):
        layer.of(asks("tool"), ENVIRONMENT)


def test_a_second_use_asks_uv_nothing(index, asks, monkeypatch):
    first = layer.of(asks("tool"), ENVIRONMENT)
    monkeypatch.setattr(layer.subprocess, "run", lambda *_, **__: pytest.fail("uv was asked"))
    assert layer.of(asks("tool"), ENVIRONMENT) == first
    with pytest.raises(pytest.fail.Exception):  # another Python is another layer
        layer.of(asks("tool"), Environment.of("3.12.1", 36, THERE))
    module, text = first.tree / "tool.py", (first.tree / "tool.py").read_text()
    module.write_text("changed")
    with pytest.raises(pytest.fail.Exception):  # and so is what somebody changed
        layer.of(asks("tool"), ENVIRONMENT)
    module.write_text(text)


def test_a_change_of_a_file_that_is_named_is_seen(asks, tmp_path):
    base, limits = tmp_path / "more/base.txt", tmp_path / "more/limits.txt"
    base.parent.mkdir()
    base.write_text("part\n-climits.txt  # beside it\n-r ../requirements.txt\n")
    limits.write_text("native==1.0\n")
    wanted = asks("# --requirement none.txt", "--requirement=more/base.txt")
    keys = [layer.key_of(wanted, ENVIRONMENT)]
    for changed, text in ((limits, "native<2\n"), (base, "tool\n")):
        changed.write_text(text)
        keys.append(layer.key_of(wanted, ENVIRONMENT))
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-r none.txt", r"none.txt cannot be read: No such file or directory\. Correct"),
        ("-c https://192.0.2.1/limits.txt", "limits.txt is elsewhere, and a change"),
        ("tool @ file:///srv/tool-1.0-py3-none-any.whl", "is a file of this machine"),
        ("tool.whl ; python_version > '3'", "is a file of this machine"),
        ("-e .", "only wheels are taken"),
        ("-r 'a", "No closing quotation: correct the line"),
    ],
)
def test_what_may_change_unseen_is_refused(asks, line, said):
    with pytest.raises(UserError, match=said):
        layer.key_of(asks("tool", line), ENVIRONMENT)


def test_the_files_that_are_named_are_bounded(asks, tmp_path):
    for number in range(64):
        (tmp_path / f"{number}.txt").write_text(f"-r {number + 1}.txt\n")
    (tmp_path / "64.txt").write_text("")
    with pytest.raises(UserError, match="comes to more than 64 files"):
        layer.key_of(asks("-r 0.txt"), ENVIRONMENT)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("old", "old depend on torch<2 and torch==2.15.0, we can conclude"),
        ("user", "would bring nvidia-other 1.0, and torch and CUDA are the stack's alone"),
        ("nothing-like-it", "nothing-like-it was not found"),
    ],
)
def test_what_cannot_be_is_refused_by_name(index, asks, line, said):
    before = list(layer.CACHE.glob("*/layer.json"))
    with pytest.raises(UserError) as refused:
        layer.of(asks(line), ENVIRONMENT)
    assert said in str(refused.value)
    assert "requirements.txt" in str(refused.value)
    assert "+stack" not in str(refused.value)
    assert list(layer.CACHE.glob("*/layer.json")) == before


def test_a_newer_package_lies_above_the_environments_and_a_wheel_for_a_newer_system_does_not(
    index, asks
):
    found = layer.of(asks("newer", "native"), ENVIRONMENT).packages
    assert found == {"newer": "1.0", "base": "9.0", "native": "1.0"}
    with pytest.raises(UserError, match="native have no wheels with a matching Python"):
        layer.of(asks("native"), Environment.of("3.9", 28, THERE))


def test_packages_are_those_of_the_machines_processor(index, asks):
    by_x86 = layer.of(asks("native"), ENVIRONMENT).packages
    by_arm = layer.of(asks("native"), replace(ENVIRONMENT, architecture="aarch64")).packages
    assert (by_x86, by_arm) == ({"native": "1.0"}, {"native": "1.5"})


def test_hashes_are_held(index, asks):
    own = hashlib.sha256((index / "part-0.5-py3-none-any.whl").read_bytes()).hexdigest()
    made = layer.of(asks(f"part==0.5 --hash=sha256:{own}"), ENVIRONMENT)
    assert made.packages == {"part": "0.5"}


def test_what_was_gathered_needs_no_index(index, asks, tmp_path, monkeypatch):
    wanted = asks("tool")
    folder = layer.bundle(wanted, ENVIRONMENT)
    # What the environment has is not taken again.
    assert {path.stem for path in (folder / "tree").glob("*.py")} == {"tool", "part"}
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(layer, "CACHE", tmp_path / "cache")
    made = layer.of(wanted, ENVIRONMENT)
    assert made.packages == {"tool": "1.0", "part": "0.5"} and {"tool", "part"} <= made.modules()


def test_layers_that_nobody_used_are_thrown_away(index, asks):
    old, past = layer.CACHE / "old", time.time() - 31 * 86400
    old.mkdir()
    os.utime(old, (past, past))
    used = layer.of(asks("tool"), ENVIRONMENT)
    os.utime(used.tree.parent, (past, past))
    assert layer.of(asks("tool"), ENVIRONMENT) == used  # which renews it
    assert used.tree.exists() and not old.exists()


def test_machines_get_the_same_files_once(index, asks, tmp_path):
    made = layer.of(asks("tool"), ENVIRONMENT)
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


def judged(script, *environments):
    known = {f"node{n}": facts(n, **one) for n, one in enumerate(environments, 1)}
    machines = OpenMachines([host(n) for n, _ in enumerate(known, 1)], {}, known)
    asked = Requirements(Config(data=""), script.for_machines(machines))
    with mock.patch.object(layer, "of", side_effect=AssertionError("a look makes no layer")):
        for _ in range(2):
            script.for_machines(machines)
            wrong = judge.problems(machines, asked, look.control_machine_facts(asked))
    return wrong


def test_environments_that_differ_get_no_layer(index, asks):
    script = Script(("train.py",), Path(), (), (), (), None, None, ("tool",), None, asks("tool"))
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
    """A project's own folder of packages, served over loopback too."""
    folder = tmp_path_factory.mktemp("sources")
    source(folder, "evil")
    wheel(folder, "leads", "1.0", [f"evil @ {(folder / 'evil-1.0.tar.gz').as_uri()}"])
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "lines",
    [
        ["evil", "--no-binary evil", "--find-links {folder}"],
        ["evil", "--only-binary :none:", "--no-index --find-links={folder}"],
        ["evil @ {url}/evil-1.0.tar.gz"],
        ["{url}/evil-1.0.tar.gz#egg=evil"],
        ["evil @ git+{url}/evil"],
        ["evil @ {url}/evil-1.0.tar.gz --hash=sha256:{sha}"],
        ["leads", "--find-links {folder}"],  # a wheel whose own metadata name the source
    ],
)
def test_no_line_of_a_project_has_anything_built_here(index, asks, sources, lines):
    folder, url = sources
    (folder / "evil ran").unlink(missing_ok=True)
    sha = hashlib.sha256((folder / "evil-1.0.tar.gz").read_bytes()).hexdigest()
    wanted = asks(*(line.format(folder=folder, url=url, sha=sha) for line in lines))
    with pytest.raises(UserError) as refused:
        layer.of(wanted, ENVIRONMENT)
    assert not (folder / "evil ran").exists()
    assert any(name in str(refused.value) for name in ("evil", "--only-binary :none:"))


def test_the_file_beside_the_script_is_found_and_another_can_be_named(tmp_path):
    inner = tmp_path / "tools"
    inner.mkdir()
    assert layer.beside([inner, tmp_path], None) is None
    (tmp_path / "requirements.txt").write_text("")
    assert layer.beside([inner, tmp_path], None) == tmp_path / "requirements.txt"
    (tmp_path / "more.txt").write_text("")
    assert layer.beside([inner], str(tmp_path / "more.txt")) == tmp_path / "more.txt"
    with pytest.raises(UserError, match="there is no file"):
        layer.beside([inner], str(tmp_path / "none.txt"))


@pytest.mark.parametrize("name", ["../../x", "a\nb", "", "-r"])
def test_of_a_name_that_no_package_has_no_file_is_made(name):
    assert Environment.of("3.11", 36, {name: "1", "Real_Name.x": "2"}).packages == (
        ("real-name-x", "2"),
    )
