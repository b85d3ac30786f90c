"""What machines are asked: the probe as it is sent, run by a Python that has nothing else."""

import ast
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import structs

from contract import layout
from contract.errors import UserError
from contract.layout import IMAGES
from contract.options import Config, Options
from launcher import look, remote
from launcher.machines import engine
from launcher.node import machine, machine_lock, probe
from tests.unit.launcher.launcher_values import host, needs
from trainer.data.folder import ImageFolder

ASKED = {
    **{name: [] for name in ("peers", "ports", "packages", "cpu_flags")},
    **{"distributions": 0, "models": None, "guard_python": "/usr/bin/python3"},
    **{"toolkit": "/", "data": "", "data_kind": IMAGES, "node_dir": "/nowhere"},
    "data_reader": "",
}


@pytest.fixture
def ask(tmp_path):
    """ask(folder) -> what a node on this machine says of a data set."""
    there = host(1, connection="local", address="127.0.0.1", env_python=sys.executable)

    def ask(folder):
        asked = {**ASKED, "data": str(folder), "node_dir": str(tmp_path / "node")}
        facts, failures = look.ask_all({there.name: there.engine.node(there)}, {there.name: asked})
        assert failures == {}
        return facts[there.name].data

    return ask


def by_hand(root):
    """Classes and images of each split as the trainer finds them, or what it says instead."""
    try:
        found = {split: ImageFolder(root, split, Options()) for split in ("train", "val")}
    except UserError as error:
        return str(error)
    return {s: (len(set(f.targets)), len(f.paths)) for s, f in found.items()}


def write(root, *names, content=b"?"):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.mark.parametrize("reader", ["read_facts", "talk"])
def test_whatever_the_answer_of_one_machine_raises_the_others_have_theirs(monkeypatch, reader):
    real, planted = getattr(look, reader), []

    def once(*given):
        if not planted:
            planted.append(given)
            raise ZeroDivisionError("planted")
        return real(*given)

    monkeypatch.setattr(look, reader, once)
    monkeypatch.setattr(engine.ThreadPoolExecutor, "map", lambda pool, *given: map(*given))
    hosts = [host(n, connection="local", env_python=sys.executable) for n in (1, 2)]
    nodes = {one.name: one.engine.node(one) for one in hosts}
    facts, failures = look.ask_all(nodes, dict.fromkeys(nodes, ASKED))
    assert set(facts) == {"node2"} and failures["node1"].code == "answer-fails"


USUAL = ("train/ant/0.png", "train/cat/0.png", "val/ant/0.png")


DATA_SETS = {
    "suffixes": (*USUAL, "train/cat/1.gif", "val/ant/1.GIF", "train/ant/deep/er/1.JPEG"),
    "other files": (*USUAL, "train/ant/.1.png", "train/notes.txt", "train/ant/notes.txt"),
    "no classes": ("train/0.png", "val/ant/0.png"),
    "no train": ("training/ant/0.png", "val/ant/0.png"),
    "hidden folders": (
        *USUAL,
        "train/@eaDir/1/a.png",
        "train/ant/.x/0.png",
        "train/.cache/a/1.png",
    ),
    "a formats' mix": (*USUAL, "train/ant/1.jfif", "train/ant/2.avif", "val/ant/3"),
    "an empty class": (*USUAL, "train/empty/notes.txt"),
    "a class of val alone": (*USUAL, "val/dog/0.png"),
}


@pytest.mark.parametrize("names", DATA_SETS.values(), ids=DATA_SETS)
def test_the_launcher_and_the_trainer_see_the_same_data_set(ask, tmp_path, names):
    """What the trainer refuses, the launcher refuses before in its words."""
    root = write(tmp_path / "data", *names)
    (root / "val/ant/gone.png").symlink_to("nowhere.png")
    told = ask(root)
    found = {split: (one.classes, one.images) for split, one in told.splits.items()}
    assert by_hand(root) == (f"--data {root}: {told.problem}" if told.problem else found)


@pytest.mark.parametrize("is_alike", [True, False])
def test_one_of_the_machines_that_mount_a_share_lists_it_for_those_that_see_the_same(
    tmp_path, monkeypatch, is_alike
):
    def ask_all(nodes, questions):
        facts, silent = real(nodes, questions)
        if not is_alike and len(facts) == 2:
            facts["node2"] = structs.replace(
                facts["node2"], data=structs.replace(facts["node2"].data, changed=1)
            )
        return facts, silent

    write(tmp_path / "share/set", *USUAL)
    share = {"data_server": "nas", "data_root": str(tmp_path / "share")}
    hosts = [
        host(n, connection="local", env_python=sys.executable, node_dir=f"{tmp_path}/{n}", **share)
        for n in (1, 2)
    ]
    real = look.ask_all
    monkeypatch.setattr(look, "ask_all", ask_all)
    machines = look.open_and_probe(hosts, needs(Config(data="set")))
    machines.close()
    one, other = (machines.facts[node.name].data.splits for node in hosts)
    assert one == other and one["train"].images == 2
    assert [(tmp_path / f"{n}/manifests").exists() for n in (1, 2)] == [True, not is_alike]


def test_an_image_that_comes_into_a_sub_folder_is_counted(ask, tmp_path):
    root = write(tmp_path / "data", *USUAL, "train/ant/deeper/0.png")
    before = ask(root)
    assert before.splits["train"].images == 3
    write(root, "train/ant/0.png", content=b"longer")  # in place: the folder's time stays
    assert ask(root) == before
    folder = root / "train/ant/deeper"
    write(root, "train/ant/deeper/1.png")
    (root / "train/ant" / os.fsdecode(b"caf\xe9.png")).write_bytes(b"?")  # no UTF-8
    os.utime(folder, ns=(1, 1))  # a clock may be coarse
    assert ask(root).splits["train"].images == 5


def test_while_a_data_set_is_read_there_are_signs_of_life(tmp_path, monkeypatch, capsys):
    """By each the control node waits longer (test_engine.py), at most one a second."""
    root = write(tmp_path / "data", *USUAL)
    clock = itertools.count(0, 0.6)
    monkeypatch.setattr(probe.time, "monotonic", lambda: next(clock))
    splits = probe.describe_data_set(root, IMAGES, tmp_path / "node")["splits"]
    assert splits["train"]["classes"] == 2
    passed = 2 * 2 * len(layout.SPLITS)  # each class is listed, and its files are measured
    printed = capsys.readouterr().out
    assert 0 < printed.count(machine.PULSE) <= passed / 2 and len(machine.PULSE) >= 64
    assert probe.describe_data_set(root, IMAGES, tmp_path / "node")["splits"] == splits
    assert not capsys.readouterr().out


def test_what_is_sent_needs_nothing_that_a_bare_python_lacks():
    asked = remote.program("launcher.node.probe", "json.dump([*sys.modules], sys.stdout)")
    argv = [sys.executable, "-ISc", asked]
    loaded = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    own = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert own <= {"launcher", "contract", "__main__"}


NAMES = {
    "a huge pid": b"9" * 60 + b"/run/holder",
    "no character set": b"7/\xff\xfe/holder",
    "two lines": b"7/a\n0: 0 0 0 0 0 1 @tandem/x/b/c",
    "escapes": b"7/\x1b]0;owned\x07/holder",
    "four parts": b"7/run/holder/more",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_socket_with_a_strange_name_is_no_run(name):
    """Every user of a machine may take any name that no other has."""
    others = [one["run"] for one in machine_lock.claims()]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as strange:
        strange.bind(b"\0tandem/" + name)
        with machine_lock.claim(f"own-{os.getpid()}", "ann@desk"):
            told = [one for one in machine_lock.claims() if one["run"] not in others]
    own = {"pid": os.getpid(), "run": f"own-{os.getpid()}", "holder": "ann@desk"}
    assert own in [{name: one[name] for name in own} for one in told]
    assert all(one["run"] not in ("run", "a", "b") for one in told)


def test_of_many_names_some_are_told(monkeypatch):
    monkeypatch.setattr(machine_lock, "MOST_RUNS", 2)
    with contextlib.ExitStack() as held:
        for number in range(3):
            held.enter_context(machine_lock.claim(f"{os.getpid()}-{number}", "ann@desk"))
        assert len(machine_lock.claims()) == 2


def test_threads_that_send_programs_parse_one_after_the_other(monkeypatch):
    """In CPython 3.11 several at once raise SystemError now and then."""
    parse, inside, most = ast.parse, [], []

    def slowly(*words):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return parse(*words)

    monkeypatch.setattr(remote.ast, "parse", slowly)
    with ThreadPoolExecutor(4) as pool:
        programs = set(pool.map(lambda _: remote.program("launcher.node.machine", ""), [0] * 8))
    assert max(most) == 1 and len(programs) == 1
