"""Readers of what a machine, another user or a file gives, each with what is generated: they read
it or refuse it in a sentence. Other readers have their fuzzers in their own files of tests."""

import json
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from contract import verbs
from contract.command_line import parse, verb_words
from contract.errors import UserError
from launcher import checkpoints, collect, outputs, participants, remote
from launcher.machines.owned import SIGNS, Owner
from launcher.node import owner
from launcher.plan import layer, sources
from planning import PlanError, network_netplan
from report.comparing import read_cells
from tests.fuzz import damaged, many, odd
from tests.unit.ansible.provision_machines import load
from tests.unit.launcher.launcher_values import host
from tools import sweep

WORDS = st.sampled_from(["", "a", "out", "..", "/", "\x1b[2J", "\ud800", "é", "9" * 30, "x" * 300])
TEXT = st.text(max_size=30) | WORDS


def pieces_of(*known, most=40):
    """Bytes that are put together of known parts and of any."""
    return st.lists(st.sampled_from(known) | st.binary(max_size=8), max_size=most).map(b"".join)


NAME = pieces_of(b"a", b"a/b.pt", b"/", b"../", b"c.safetensors", b"\xff", b"x" * 256, b"\0", b"d/")
LISTED = st.lists(
    st.tuples(NAME.map(lambda name: quote(b"out/" + name)), st.integers(0, 99), st.integers(-9, 99))
    | TEXT,
    max_size=9,
)


def raising(error):
    def fail(*_):
        raise error

    return fail


@many(400)
@example([[("out/a%FF", 1, 1)]] * 2, "")
@given(
    st.lists(LISTED, min_size=2, max_size=2),
    st.sampled_from(["", "", "", "its answer", "its connection", "an error of ours"]),
)
def test_of_any_listing_files_below_its_folders_are_taken(said, wrong):
    nodes = {f"node{n}": SimpleNamespace(host=host(n), start=lambda argv: argv) for n in (1, 2)}
    documents = [json.dumps({"files": files, "count": 9, "others": {}}) for files in said]
    answers = iter([(remote.MARK * (wrong != "its answer") + d).encode() for d in documents])
    if wrong == "its connection":
        nodes["node1"].start = raising(OSError("it is gone"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "talk", lambda *_: (next(answers, b""), "", 0))
        patch.setattr(remote, "program", lambda *_: "")
        if wrong == "an error of ours":
            patch.setattr(outputs, "is_below", raising(ZeroDivisionError("planted")))
        patch.setattr(checkpoints.Search, "read_piece", lambda *_: b"x")
        there, folder = dict.fromkeys(nodes, "/there"), Path(tempfile.gettempdir())
        site = SimpleNamespace(machines=SimpleNamespace(nodes=nodes), folder=folder, folders=there)
        site.terminal, site.attempts = SimpleNamespace(say=print), SimpleNamespace(list=[])
        search = checkpoints.Search(site, ("out",))
        try:
            own = search.find_on_all()
        except UserError:
            own = None
    for held in search.checkpoints.values():
        names = [*map(Path, held)]
        for name in names:
            assert name.parts[0] == "out" and ".." not in name.parts
            assert not set(name.parents) & set(names)
    assert own is None or all(own in held for held in search.checkpoints.values())


def test_of_a_file_no_more_is_kept_than_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "stream_output", lambda *_, **__: iter([collect.MARK + b"x" * 50]))
    node = SimpleNamespace(start=lambda argv: SimpleNamespace(close=lambda: None))
    path = tmp_path / "file"
    assert collect.receive_file(node, "/", "x", path, 9) == path.stat().st_size == 10
    node.start = raising(UserError("it is gone."))
    with pytest.raises(collect.NotCopied, match="it is gone"):
        collect.receive_file(node, "/", "x", path, 9)


MARK = remote.MARK.encode()


@many(200)
@example(MARK + b'{"sign": "seat"}\n')
@given(pieces_of(MARK, b'{"sign": ', b'"asked"', b'""', b"}", b"\n", b"null", b"[", b"{"))
def test_of_its_owner_a_machine_says_what_is_known_or_nothing(said):
    node = SimpleNamespace(host=host(1, owner=Owner(tuple(SIGNS))), start=lambda argv: argv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "talk", lambda *_: (said, "", 0))
        answer = participants._ask_owner(node)
        assert answer is None or answer.code in ("owner-there", "owner-unknown")


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
    assert all(isinstance(pid, int) for pid in owner.gpu_pids(ask))


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


KEPT = {"sha256": "a" * 64, "packages": {"tool": "1.0"}, "provided": {"torch": "2.15.0"}}


@many(200)
@given(odd(KEPT) | damaged(json.dumps(KEPT).encode()), st.dictionaries(TEXT, TEXT, max_size=5))
def test_a_layer_is_whole_or_made_anew(kept, packages):
    """`packages`: those that a machine says it has."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        (Path(name) / "k/tree").mkdir(parents=True)
        content = kept if isinstance(kept, bytes) else json.dumps(kept).encode()
        (Path(name) / "k/layer.json").write_bytes(content)
        patch.setattr(layer, "tree_sha256", lambda tree: "a" * 64)
        found = layer.load_layer(Path(name) / "k")
        assert found is None or all(isinstance(one, str) for one in found.differs(packages))
    there = layer.Environment.from_facts("3.11.2", 36, packages)
    for stem, _ in there.packages:
        assert len(stem) <= 100 and "/" not in stem and stem.isascii()


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
@example(b"x = " + b"-" * 200_000 + b"1")
@given(damaged(SOURCE) | pieces_of(*SOURCE.split(b" "), b" ", b"\n", b"-" * 9000, b"(" * 300))
def test_any_source_is_looked_through(source):
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "helpers.py").write_bytes(source)
        path = Path(name) / "train.py"
        path.write_bytes(source)
        found = sources.find_loaded(path, [Path(name)])
        assert all(isinstance(one, str) for one in found.packages)


CELL = {"name": "SYNC=ef:3", "argv": ["--sync=ef:3"], "command": "make train SYNC=ef:3"}
DONE = {"round": 0, "cell": 0, "log": "001-1-1.log", "run": None, "cause": None}
RUN = "20260101T000000Z-resnet18-1n"
SWEPT = {"sweep": "x", "rounds": 2, "cells": [CELL], "runs": [DONE, {**DONE, "run": RUN}]}
BEGUN = f'tandem-result {{"run": "{RUN}"}}\n'
LOGS = (BEGUN, 'tandem-result {"refused": "no GPU here"}\n', BEGUN[:-9], "x\n", None)
FAILED = {"status": "x", "attempts": [{"first_cause": None}, {"first_cause": {"message": "x"}}]}


@many(300)
@example(SWEPT, FAILED, None)
@example(SWEPT, {"status": "finished", "attempts": []}, BEGUN)
@example({**SWEPT, "runs": [{**DONE, "cell": 1}]}, FAILED, "")
@given(odd(SWEPT) | damaged(json.dumps(SWEPT).encode()), odd(FAILED), st.sampled_from(LOGS))
def test_a_damaged_sweep_goes_on_or_is_refused(made, ended, log):
    """And so does one with a run whose files are damaged."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.chdir(name)
        folder, run = Path("runs/sweeps/20260101T000000Z"), Path("runs", RUN)
        for one in (folder, run):
            one.mkdir(parents=True)
        path = folder / "sweep.json"
        path.write_bytes(made) if isinstance(made, bytes) else path.write_text(json.dumps(made))
        (run / "attempts.json").write_text(json.dumps(ended))
        if log is not None:
            (folder / DONE["log"]).write_text(log)
        for read in (read_cells, sweep.read_state):
            try:
                state = read(folder)
            except UserError as error:
                assert "is damaged (" in str(error) or "is not a sweep: " in str(error)
                return
        for entry in state["runs"]:
            sweep.adopt_run(folder, entry)
            assert state["cells"][entry["cell"]]["argv"] is not None
        assert log is None or sweep.explain_failure(folder / DONE["log"], 1)


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
        assert "node1: /etc/netplan/x.yaml is not a netplan file: " in str(error)


TYPED = st.sampled_from(["NODES=2", "ARGS=--lr 1", "--", "--lr", "x", "--nodes", "--help", "LR=3"])
VALUES = TEXT | st.sampled_from(
    ["-1", "4", "no", "latest", "'", "--lr '0.1", "/x", "a\0b", "~nosuchuser/x", "9" * 5000]
)


def lines_of(verb):
    named = st.sampled_from([*verbs.VERBS[verb].variables, "NODES"])
    words = TYPED | TEXT | st.builds("{}={}".format, named, VALUES)
    return st.tuples(st.just(verb), st.lists(words, max_size=5))


@many(600)
@example(("train", ["GPUS=2"]))
@example(("train", ["EPSILON=2"]))
@example(("env", ["NODES=2"]))
@example(("train", ["--help"]))
@example(("compare", ["latest~1", "latest"]))
@example(("train", ["--args", "--lr 1", "--", "--seed", "3"]))
@example(("status", ["RUN=a", "--", "b"]))
@example(("imagenet", ["TO=~nosuchuser/x"]))
@given(st.sampled_from([*verbs.VERBS]).flatmap(lines_of))
def test_any_line_is_taken_or_refused(line):
    verb, typed = line
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
