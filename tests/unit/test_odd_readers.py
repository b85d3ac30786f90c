"""Readers of what a machine, another user or a file gives, each with what is generated: they read
it or refuse it in a sentence. Other readers have their fuzzers in their own files of tests."""

import contextlib
import json
import os
import pickle
import socket
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from contract.command_line import parse, verb_words
from contract.errors import UserError
from contract.strategies import ATTACHED
from contract.text import clean
from launcher import checkpoints, collect, control, folders, outputs, owners, remote, status, top
from launcher.machines import engine
from launcher.machines.owned import SIGNS, Owner
from launcher.node import owner, pairprobe
from launcher.plan import code, layer, models, requirements
from planning import PlanError, network_netplan
from report.comparing import read_cells
from report.text import section_lines
from report.view import Section
from tests.fuzz import damaged, many, odd
from tests.unit.ansible.provision_machines import load
from tests.unit.launcher.launcher_values import host
from tools import sweep

WORDS = st.sampled_from(["", "a", "out", "..", "/", "\x1b[2J", "\ud800", "é", "9" * 30, "x" * 300])
TEXT = st.text(max_size=30) | WORDS


def pieces_of(*known, most=40):
    """Bytes that are put together of known parts and of any."""
    return st.lists(st.sampled_from(known) | st.binary(max_size=8), max_size=most).map(b"".join)


LISTED = pieces_of(
    *(b"5.5 1 ", b"17 99 ", b"1", b" ", b"\t", b"\tout\0", b"\tother\0", b"\0", b"a", b"a/b.pt"),
    *(b"/", b"../", b"c.safetensors", b"5.5 7 a.pt\tout\0", b"5.5 7 a.pt/b\tout\0", b"\xff"),
    *(b"7.0 1 a.safetensors\tout\0", b"x" * 210, b"d/" * 20),
)


def raising(error):
    def fail(*_):
        raise error

    return fail


@many(400)
@example([b"1 1 a\xff\tout\0"] * 2, "")
@given(
    st.lists(LISTED, min_size=2, max_size=2),
    st.sampled_from(["", "", "", "its status", "its connection", "an error of ours"]),
)
def test_of_any_listing_files_below_its_folders_are_taken(said, wrong):
    nodes = {f"node{n}": SimpleNamespace(host=host(n), start=lambda argv: argv) for n in (1, 2)}
    answers = iter([(word, "", int(wrong == "its status")) for word in said])
    if wrong == "its connection":
        nodes["node1"].start = raising(OSError("it is gone"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "talk", lambda *_: next(answers, (b"", "", 1)))
        if wrong == "an error of ours":
            patch.setattr(outputs, "_read", raising(ZeroDivisionError("planted")))
        patch.setattr(checkpoints, "flaw", lambda *_: None)
        there, folder = dict.fromkeys(nodes, "/there"), Path(tempfile.gettempdir())
        held = checkpoints.held_by(nodes, there, ("out",))
        try:
            own = checkpoints.Candidates(held, nodes, there, folder, print).own()
        except UserError:
            own = None
    for files in held.values():
        names = [Path(file.name) for file in files]
        assert len(set(names)) == len(names)
        for name in names:
            assert name.parts[0] == "out" and ".." not in name.parts and str(name).isprintable()
            assert not set(name.parents) & set(names)
    assert own is None or all(own in [f.name for f in files] for files in held.values())


TORCH = b"PK\3\4" + bytes(90) + b"PK\5\6" + bytes(18)
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
TENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)
OF_A_RANK = pickle.dumps({ATTACHED: 1, "spec": "ef:5"})
LONG = (70_000).to_bytes(8, "little") + bytes(70_000)
INTACT = [
    ("a.pt", TORCH, len(TORCH)),
    ("a.safetensors", TENSORS, len(TENSORS)),
    ("a.safetensors", LONG, len(LONG)),
]


@many(300)
@example("a.pt", None, 9)
@example("a.pt", b"", 9)
@example("a.pt", OF_A_RANK, 9)
@example(*INTACT[0])
@example(*INTACT[1])
@example(*INTACT[2])
@example("a.safetensors", (1 << 40).to_bytes(8, "little"), 99)
@given(
    st.sampled_from(["a.pt", "a.safetensors", "b/random_states_0.pkl"]),
    st.sampled_from([TORCH, TENSORS, OF_A_RANK]).flatmap(damaged) | st.binary(max_size=99),
    st.integers(0, 1 << 40),
)
def test_any_file_is_whole_or_has_a_flaw(name, content, size):
    def receive(_node, _source, target, most, begin=0):
        if content is None:
            return None
        target.write_bytes(content[begin : begin + most])
        return len(content)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
        patch.setattr(checkpoints, "receive", receive)
        file = outputs.Written(name, size, 1)
        try:
            wrong = checkpoints.flaw(None, name, file, Path(scratch))
        except collect.NotHere:
            assert content is None
            return
    assert wrong is None or wrong.isprintable()
    assert wrong is None or (name, content, size) not in INTACT


class Sends:
    """A process that has sent these pieces, and then ends or fails."""

    def __init__(self, pieces, status=0, wrong=None):
        self.pieces, self.status, self.wrong = list(pieces), status, wrong

    def read(self):
        return self.pieces.pop(0) if self.pieces else b""

    def wait(self, seconds=None):
        return self.status

    def stderr(self):
        return "x"

    def close(self):
        pass


def pieces(process, *_, **__):
    """In the place of engine.pieces, which waits for a process."""
    yield from iter(process.read, b"")
    if process.wrong:
        raise process.wrong


PARTS = st.sampled_from([b"tandem-", b"file\n", collect.MARK, b"x" * 50, b"\n"])
SENT = st.lists(PARTS | st.binary())


WRONG = [None, None, engine.Late(), OSError(5, "Input/output error"), UserError("it is gone.")]


@many(300)
@given(SENT, st.sampled_from([0, 1, 3, 4, 5, -1]), st.integers(0, 60), st.sampled_from(WRONG))
def test_of_any_file_so_many_bytes_are_taken(sent, status, limit, wrong):
    sends = Sends([piece for piece in sent if piece], status, wrong)
    node = SimpleNamespace(start=lambda argv: sends)
    if isinstance(wrong, UserError):
        node.start = raising(wrong)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "pieces", pieces)
        patch.setattr(collect, "GREETING", 100)
        target = Path(name) / "file"
        try:
            size = collect.receive(node, "x", target, limit)
        except collect.NotHere as error:
            assert str(error)
            return
        assert size is None or target.stat().st_size == size <= limit + 1
        after = b"".join(sent).partition(collect.MARK)[2]
        assert size is None or target.read_bytes() == after[: limit + 1]
        collect.cut_to_lines(target, limit)
        assert target.stat().st_size <= limit


@many(200)
@given(pieces_of(b"step-0001.pt", b"step-", b"9" * 19, b".pt", b"\n", b" ", b"best.pt", b"\xb2"))
def test_of_any_names_the_newest_step_is_taken(said):
    there = dict.fromkeys(("node1", "node2", "node3"), "/there")
    nodes = {name: SimpleNamespace(start=lambda argv: argv) for name in ("node1", "node2")}
    answers = iter([(said, "", 0), (said, "", 2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "talk", lambda *_: next(answers))
        held = collect.checkpoints(nodes, there)
    names = held.pop("node1")
    assert not held
    newest = collect.newest(names)
    assert newest is None or (newest[0] >= 0 and newest[1] in names and "/" not in newest[1])


MARK = remote.MARK.encode()


@many(200)
@example(MARK + b'{"sign": "seat"}\n')
@given(pieces_of(MARK, b'{"sign": ', b'"asked"', b'""', b"}", b"\n", b"null", b"[", b"{"))
def test_of_its_owner_a_machine_says_what_is_known_or_nothing(said):
    node = SimpleNamespace(host=host(1, owner=Owner(tuple(SIGNS))), start=lambda argv: argv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "talk", lambda *_: (said, "", 0))
        assert owners._ask(node) in (None, *SIGNS, "silent")


SESSIONS = st.text("Seat=user\n 0yesno\x1b²", max_size=60)
CELLS = st.lists(st.sampled_from(["pid", "sm", "-", "²", "3120", "99", "9" * 5000]), max_size=4)
COLUMNS = st.lists(CELLS, min_size=1, max_size=4)


@many(300)
@example("", [["pid", "sm"], ["3120", "99"]])
@given(SESSIONS, COLUMNS)
def test_what_the_owner_s_programs_print_is_a_sign_or_none(printed, cards):
    def ask(argv):
        lines = "\n".join(map(" ".join, cards))
        return f"# {lines}" if argv[0] == "nvidia-smi" else printed

    assert all(owner.is_at_seat(one) in (True, False) for one in owner.sessions(ask))
    assert all(isinstance(pid, int) for pid in owner.busy_cards(ask))


NAMES = st.lists(
    st.sampled_from([b"tandem/", b"1/", b"9" * 12 + b"/", b"run", b"/", b"\n", b"\x1b[2J", b"a@b"])
    | st.binary(max_size=6),
    max_size=8,
).map(b"".join)


@many(150)
@example([b"tandem/1/run/anna@pc"], ["x"])
@given(st.lists(NAMES, max_size=3), st.lists(st.sampled_from("ab\x1b")))
def test_what_others_claim_is_shown_as_text(claimed, said_no):
    """By sockets, and by files."""
    tandem = load("ansible/roles/owner/files/tandem.py")
    sockets = []
    with tempfile.TemporaryDirectory() as name:
        tandem.AWAY = Path(name)
        for one in said_no:
            (Path(name) / one).touch()
        for one in claimed:
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                sockets[-1].bind(b"\0" + one[:100])
            except OSError:
                continue  # it has this name already
        shown = [*tandem.runs(), *tandem.refusals(), *tandem.refusals().values()]
        assert all(text.isprintable() for text in shown)
        assert len(tandem.own_files()) == len(set(said_no))
        for one in sockets:
            one.close()


SAMPLE = {
    **{"kind": "sample", "mono": 20.0, "cores": 4, "cpu_busy": 2.0, "memory_total": 9},
    **{"card": {"tx_bytes": 5, "rx_dropped": 1}, "gpus": [{"index": 0, "utilization": 9}]},
    **{"disks": {"sda": {"util": 9.0, "rkB/s": 9.0}, "sdb": {"util": 3.0}}, "alone": [0, 1]},
    **{"swap_total": 9, "swap_free": 1, "disk_free": 9, "temperature": 95.0, "memory_available": 1},
}
LINE = json.dumps(SAMPLE).encode() + b"\n"


@many(300)
@example(b"x" * 2000, "goes on")
@given(
    odd([SAMPLE, {**SAMPLE, "mono": 26.0}]) | damaged(LINE * 3) | pieces_of(LINE, b"{", b"\n"),
    st.sampled_from(["goes on", "ends", "fails"]),
)
def test_whatever_a_machine_tells_of_itself_fits_a_table(told, then):
    data = (
        told
        if isinstance(told, bytes)
        else b"".join(json.dumps(one).encode() + b"\n" for one in told)
    )
    left = [data[at : at + 500] for at in range(0, len(data), 500)]

    def read():
        if left:
            return left.pop(0)
        if then == "fails":
            raise OSError("it is gone")
        return b"" if then == "ends" else None

    one = top.Idle(host(1), SimpleNamespace(read=read))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top, "PIECE", 1500)
        while left and not one.why:
            one.look()
        one.look()
    if one.figures:
        section = Section("", top.status.machines_of([one.figures], False))
        table = section_lines(section, 80)
        assert len(top.fitting(table, 80, 1)) == 1 and top.fitting(table, 80, 24)


KEPT = {"sha256": "a" * 64, "packages": {"tool": "1.0"}, "provided": {"torch": "2.15.0"}}


@many(200)
@given(odd(KEPT) | damaged(json.dumps(KEPT).encode()), st.dictionaries(TEXT, TEXT, max_size=5))
def test_a_layer_is_whole_or_made_anew(kept, packages):
    """`packages`: those that a machine says it has."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "CACHE", Path(name))
        (Path(name) / "k/tree").mkdir(parents=True)
        content = kept if isinstance(kept, bytes) else json.dumps(kept).encode()
        (Path(name) / "k/layer.json").write_bytes(content)
        patch.setattr(layer, "tree_sha256", lambda tree: "a" * 64)
        found = layer._kept("k")
        assert found is None or all(isinstance(one, str) for one in found.differs(packages))
    there = layer.Environment.of("3.11.2", 36, packages)
    for stem, _ in there.packages:
        assert len(stem) <= 100 and "/" not in stem and stem.isascii()


PARTS = (
    *("-r ", "-c ", "other.txt", "tool==1", " --hash=sha256:0", "\n", "# x", "-e .", '"', ";", "é"),
    *("--find-links x", "./a.whl", "\\\n", "tool @ file:///x", "-r https://x"),
)
ASKED = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@many(300)
@example("-r other.txt", "-r third.txt\n-c requirements.txt")
@example("-r other.txt", "-r requirements.txt")
@example("#" * 100, "")
@given(ASKED | st.text(max_size=40), ASKED)
def test_a_list_of_packages_is_read_or_refused(asked, other):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        path = Path(name) / "requirements.txt"
        path.write_text(asked, errors="replace")
        path.with_name("other.txt").write_text(other)
        patch.setattr(requirements, "MOST_FILES", 2)
        patch.setattr(requirements, "MOST_BYTES", 90)
        try:
            assert requirements.texts(path)[0] == path.read_text()
        except UserError as error:
            assert str(error)


SOURCE = b"""
import torch, helpers
from package.parts import one as two
from . import x
try:
    import wandb
except ImportError:
    wandb = None
def build(): return 1
class Net: pass
named = getattr(helpers, "made")
"""


@many(300)
@example(b"x = " + b"-" * 200_000 + b"1", "")
@given(damaged(SOURCE) | pieces_of(*SOURCE.split(b" "), b" ", b"\n", b"-" * 9000, b"(" * 300), TEXT)
def test_any_source_is_looked_through(source, function):
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "helpers.py").write_bytes(source)
        path = Path(name) / "train.py"
        path.write_bytes(source)
        found = code.loaded_by(path, [Path(name)])
        assert all(isinstance(one, str) for one in (*found.packages, *found.texts))
        for wanted in (function, "build", "made", "buildd"):
            with contextlib.suppress(UserError):
                models._refuse_unknown("m", path, wanted)


CELL = {"name": "SYNC=ef:3", "argv": ["--sync=ef:3"], "command": "make train SYNC=ef:3"}
DONE = {"round": 0, "cell": 0, "log": "001-1-1.log", "run": None, "cause": None}
SWEPT = {"sweep": "x", "rounds": 2, "cells": [CELL], "runs": [DONE, {**DONE, "run": "r1"}]}
LOGS = ("tandem: run r1, attempt 1\n", "tandem: no GPU here\n", "x\n", None)
FAILED = {"status": "x", "attempts": [{"first_cause": None}, {"first_cause": {"message": "x"}}]}


@many(300)
@example(SWEPT, FAILED, None)
@example(SWEPT, {"status": "finished", "attempts": []}, "tandem: run r1, attempt 1\n")
@example({**SWEPT, "runs": [{**DONE, "cell": 1}]}, FAILED, "")
@given(odd(SWEPT) | damaged(json.dumps(SWEPT).encode()), odd(FAILED), st.sampled_from(LOGS))
def test_a_damaged_sweep_goes_on_or_is_refused(made, ended, log):
    """And so does one with a run whose files are damaged."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.chdir(name)
        folder, run = Path("runs/sweeps/20260101T000000Z"), Path("runs/r1")
        for one in (folder, run):
            one.mkdir(parents=True)
        path = folder / "sweep.json"
        path.write_bytes(made) if isinstance(made, bytes) else path.write_text(json.dumps(made))
        (run / "attempts.json").write_text(json.dumps(ended))
        if log is not None:
            (folder / DONE["log"]).write_text(log)
        for read in (read_cells, sweep.read):
            try:
                state = read(folder)
            except UserError as error:
                assert "is damaged (" in str(error) or "is no sweep: " in str(error)
                return
        for entry in state["runs"]:
            sweep.adopt(folder, entry)
            assert state["cells"][entry["cell"]]["argv"] is not None
        assert log is None or sweep.why(folder / DONE["log"], 1)


ENDED = {"status": "failed", "attempts": [{"attempt": 1, "status": "x", "nodes": ["node1"]}]}
ENDED["attempts"][0].update(reason="first", first_cause={"message": "x"})
ENDED["attempts"] += [{**ENDED["attempts"][0], "first_cause": None}]
SAID = pieces_of(
    b"one\n", b"\x1b]0;x\x07", b"\x1b[2J", b"\r", b"\n", b"\xe2\x80\xae", b"x" * 70_000
)


@many(100)
@given(odd(ENDED) | damaged(json.dumps(ENDED).encode()), SAID, SAID)
def test_a_foreign_run_is_shown_as_text(ended, said, pid):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "RUNS", Path(name))
        shown = []
        patch.setattr(control, "print", lambda *text, **_: shown.extend(text), raising=False)
        assert control.runs() == 0
        folder = Path(name) / "20260101T000000Z-resnet18-2n"
        (folder / "nodes/node1").mkdir(parents=True)
        content = ended if isinstance(ended, bytes) else json.dumps(ended).encode()
        for file, data in (
            ("attempts.json", content),
            ("plan.json", content),
            ("controller.pid", pid),
        ):
            (folder / file).write_bytes(data)
        for file in ("controller.log", "controller.log.first", "nodes/node1/rank0.log"):
            (folder / file).write_bytes(said)
        assert control.runs() == status.status(folder.name) == control.attach(folder.name) == 0
        assert control.controller(folder) is None and top.tail(folder, 9) is not None
        control.elsewhere(folder)
        with folders.lock(folder):
            assert control.controller(folder) == os.getpid()
            assert control.state(folder) == "running"
        assert [clean(text) for text in shown] == shown


CARD = {"match": {"name": "eno1", "macaddress": "00:11"}, "addresses": ["192.0.2.1/24", {"a": 1}]}
CARD.update({"set-name": "lan", "nameservers": {"addresses": []}, "routes": [{"to": "default"}]})
NETPLAN = {"network": {"version": 2, "ethernets": {"eno1": CARD, "renderer": "networkd"}}}


@many(300)
@example(NETPLAN)
@example({"network": {"ethernets": {"eno1": {**CARD, "set-name": 1}}}})
@example({"network": {"ethernets": {"eno1": {**CARD, "addresses": [{1: 2}]}}}})
@example({"network": {"ethernets": {"eno1": {**CARD, "routes": 7}}}})
@given(odd(NETPLAN) | damaged(json.dumps(NETPLAN).encode()))
def test_any_file_of_netplan_s_is_looked_through_or_named(made):
    """JSON is YAML, too."""
    text = made.decode(errors="replace") if isinstance(made, bytes) else yaml.safe_dump(made)
    try:
        network_netplan._read("/etc/netplan/x.yaml", text, {"host": "node1"})
    except PlanError as error:
        assert "node1: /etc/netplan/x.yaml is no file of netplan's: " in str(error)


TYPED = st.sampled_from(["NODES=2", "ARGS=--lr 1", "--", "--lr", "x", "--nodes", "--help", "LR=3"])


@many(300)
@example("train", ["GPUS=2"])
@example("train", ["EPSILON=2"])
@example("status", ["NODES=2"])
@example("env", ["NODES=2"])
@example("train", ["--help"])
@example("compare", ["latest~1", "latest"])
@example("train", ["--args", "--lr 1", "--", "--seed", "3"])
@example("status", ["RUN=a", "--", "b"])
@given(st.sampled_from(["train", "status", "env", "plan"]), st.lists(TYPED | TEXT, max_size=5))
def test_any_line_is_taken_or_refused(verb, typed):
    try:
        assert isinstance(verb_words(verb, typed, f"make {verb}"), dict)
    except UserError as error:
        assert str(error)
    except SystemExit:
        assert not {"-h", "--help"}.isdisjoint(typed)


@many(200)
@example("--help")
@example('--config={"epochs": 3}')
@example("--config={" + "[" * 3000)
@given(TEXT | st.sampled_from(["--epochs", "--config={", '--config={"epochs": "x"}']))
def test_any_word_is_the_trainer_s_or_is_refused(word):
    try:
        assert parse([word]).model
    except UserError as error:
        assert len(str(error)) < 5000
    except SystemExit:
        assert word in ("-h", "--help")


REQUEST = b'{"token": "secret", "host": "node2", "test": "ring"}\n'


@many(100)
@given(st.lists(damaged(REQUEST) | pieces_of(b"{", b"\n", b"[" * 900, REQUEST[:-1]), max_size=5))
def test_who_comes_to_a_measurement_without_its_token_is_left(said):
    """It is any machine of the network."""
    with socket.create_server(("127.0.0.1", 0)) as any_port:
        plan = {"address": "127.0.0.1", "port": any_port.getsockname()[1], "token": "secret"}
    with pairprobe.Door(plan) as door, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairprobe, "WAITING", 2)
        coming = []
        for words in said:
            coming.append(socket.create_connection((plan["address"], plan["port"]), timeout=10))
            coming[-1].sendall(words)
            coming[-1].shutdown(socket.SHUT_WR)
        try:
            while True:
                connection, request = door.accept(time.monotonic() + 0.01)
                assert request["token"] == "secret"
                connection.close()
        except socket.timeout:
            pass
        for one in coming:
            one.close()
