"""The records of a run on their way: from the node's files, by pieces, into the copies here."""

import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boundary import frames
from boundary.frames import Frames
from boundary.schema import Invalid
from contract.records import PIECE
from launcher import collect
from launcher.background import MIB, Spool
from launcher.machines.local import LocalNode, LocalProcess
from launcher.node.link import FrameWriter
from launcher.node.records import BACKLOG_LIMIT, Tail
from launcher.watch import failures, guards
from launcher.watch.guards import GuardConnection
from launcher.watch.lines import RankLog, RunLogs
from launcher.watch.watch import Watch
from tests.fuzz import many
from tests.unit.launcher.launcher_values import host
from tests.unit.launcher.scripted_guards import OBEYS, watch

HELLO = b'{"type": "hello", "protocol": 2, "way": "service"}\n'
TASK = SimpleNamespace(attempt=1, ranks=[0])
STEPS, MACHINE = "rank0.1.steps.jsonl", "machine.1.jsonl"
PLAN = SimpleNamespace(attempt=1, nodes=[SimpleNamespace(host="node1", ranks=(0,))])


class Way:
    """A node's folder, its tail, and the copies; `move` carries what has come since."""

    def __init__(self, tmp_path, most=1 << 30):
        self.there, self.here = tmp_path / "there", tmp_path / "here"
        self.there.mkdir()
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.writer, self.tail = FrameWriter(writer), Tail(self.there, TASK)
        self.frames, self.spool = Frames((0,)), Spool()
        list(self.frames.feed(HELLO))
        self.copies = guards.Records(PLAN, self.here, self.spool, most)

    def write(self, name, data):
        with (self.there / name).open("ab") as file:
            file.write(data)

    def move(self, rest=False):
        """Returns the names and bytes of the pieces."""
        (self.tail.send_end if rest else self.tail.send)(self.writer)
        pieces = []
        while True:
            self.writer.flush()
            try:
                data = os.read(self.reader, 1 << 20)
            except BlockingIOError:
                self.spool.drain()
                return pieces
            for frame, payload in self.frames.feed(data):
                self.copies.take("node1", frame, payload)
                pieces.append((frame.file, payload))

    def copy(self, name):
        path = self.here / "nodes/node1" / name
        return path.read_bytes() if path.exists() else b""


@pytest.fixture
def way(tmp_path):
    return Way(tmp_path)


def lines(count, size=100):
    return b"".join(json.dumps({"n": n, "x": "x" * size}).encode() + b"\n" for n in range(count))


def test_the_copies_grow_by_whole_lines_and_are_the_files_in_the_end(way):
    data = lines(2000)
    for begin in range(0, len(data), 7777):
        way.write(STEPS, data[begin : begin + 7777])
        way.write(MACHINE, data[begin : begin + 7777])
        for _, piece in way.move():
            assert piece.endswith(b"\n") and len(piece) <= PIECE
    way.move(rest=True)
    assert way.copy(STEPS) == way.copy(MACHINE) == data


def test_a_line_without_end_comes_in_pieces_and_half_a_line_waits(way):
    way.write(STEPS, b"x" * (2 * PIECE + 10))
    assert [len(piece) for _, piece in way.move(rest=True)] == [PIECE, PIECE]
    way.write(STEPS, b"\n")
    way.move()
    assert way.copy(STEPS) == b"x" * (2 * PIECE + 10) + b"\n"


def test_while_the_reader_is_behind_nothing_is_added_but_beats(way):
    way.write(STEPS, lines(20000))
    for _ in range(100):
        way.tail.send(way.writer)
    assert way.writer.size <= BACKLOG_LIMIT + 2 * PIECE
    way.writer.send("beat", unix=0.0, running=[])
    assert way.writer.pending


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_there_is_not_read(way, kind, tmp_path):
    path = way.there / STEPS
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret\n")
    make = {"link": lambda: path.symlink_to(secret), "pipe": lambda: os.mkfifo(path)}
    make.get(kind, path.mkdir)()
    assert way.move(rest=True) == []


RECORDS = st.builds(
    frames.Record,
    file=st.sampled_from([STEPS, MACHINE, "rank1.1.steps.jsonl", "../plan.json", ""]),
    offset=st.sampled_from([0, 4, 8, 5, -1]),
    bytes=st.just(4),
)


@many(400)
@given(st.lists(RECORDS, max_size=9), st.booleans())
def test_of_any_pieces_those_that_follow_each_other_are_kept(pieces, link):
    """Or none beyond a link that lies in the place of a copy."""
    with tempfile.TemporaryDirectory() as name:
        folder, spool = Path(name), Spool()
        copies = guards.Records(PLAN, folder, spool, 8)
        taken = {STEPS: 0, MACHINE: 0}
        if link:
            (folder / "nodes/node1").mkdir(parents=True)
            (folder / "nodes/node1" / MACHINE).symlink_to(folder / "elsewhere")
        for frame in pieces:
            try:
                copies.take("node1", frame, b"abc\n")
            except Invalid:
                assert frame.offset != taken.get(frame.file)
            else:
                assert frame.offset == taken[frame.file]
                taken[frame.file] += 4
        spool.drain()
        copy = folder / "nodes/node1" / STEPS
        assert (copy.stat().st_size if copy.exists() else 0) == min(8, taken[STEPS])
        assert not [*folder.glob("*.json*"), *folder.glob("elsewhere")]


@pytest.mark.parametrize("size", [1, PIECE])
def test_more_than_a_guard_sends_is_refused_before_it_fills_anything(way, size):
    """Such as 100 MB a second, or as many pieces of a byte."""
    piece, begun = b"x" * size, time.monotonic()
    with pytest.raises(Invalid):
        for number in range(1 << 16):
            way.copies.take("node1", frames.Record(STEPS, number * size, size), piece)
    most = guards.EXTRA_BYTES + PIECE * (time.monotonic() - begun)
    way.spool.drain()
    # What a second may bring is counted from the first piece, a moment before `begun` ends.
    assert 0 < len(way.copy(STEPS)) <= 1.1 * most * size / max(size, guards.PIECE_COST)


@pytest.mark.parametrize("takes", [0.0, 0.5])
def test_what_a_full_disk_did_not_take_is_fetched_in_the_end_once_and_in_order(
    takes, way, monkeypatch
):
    """For a while it takes nothing, or the half of a piece."""

    def write(descriptor, piece):
        if not takes:
            raise OSError(28, "No space left on device")
        return os.write(descriptor, piece[: int(len(piece) * takes)])

    data = lines(900)
    third = len(data) // 3
    for part in range(3):
        way.write(STEPS, data[part * third : (part + 1) * third if part < 2 else None])
        with monkeypatch.context() as patch:
            if part == 1:
                patch.setattr(guards, "os", SimpleNamespace(**{**vars(os), "write": write}))
            way.move(rest=True)
    assert way.copy(STEPS) != data and data.startswith(way.copy(STEPS))
    assert bring(way) == []
    assert way.copy(STEPS) == data


def bring(way, most=1 << 30):
    folder = way.there.parent / "node"
    (folder / "nodes").mkdir(parents=True)
    (folder / "nodes/node1").symlink_to(way.there)
    attempts = [{"attempt": 1, "ranks": {"node1": [0]}}]
    nodes = {"node1": LocalNode(host(1))}
    return collect.fetch_records(nodes, {"node1": str(folder)}, attempts, way.here, most)


def test_a_copy_that_is_longer_than_the_node_s_file_stays(way):
    way.write(STEPS, lines(50))
    way.move(rest=True)
    (way.there / STEPS).write_bytes(b"")
    assert bring(way) == []
    assert way.copy(STEPS) == lines(50)


def test_of_a_record_that_is_too_large_the_beginning_is_fetched(way):
    way.write(STEPS, lines(30000))
    (way.here / "nodes/node1").mkdir(parents=True)
    (way.here / "nodes/node1" / STEPS).write_bytes(lines(100))
    (said,) = bring(way, MIB)
    assert "KEEP=" in said
    copy = way.copy(STEPS)
    assert MIB - 200 < len(copy) <= MIB and copy.endswith(b"\n") and lines(30000).startswith(copy)


PLANTED = (
    f"say(type='record', file='{STEPS}', offset=0, bytes=4); sys.stdout.write('abcd');"
    "say(type='log', rank=0, stream='stdout', bytes=1); sys.stdout.write('x');"
    "sys.stdout.flush(); say(type='trouble', what='x', message='x');"
    "{more}; time.sleep(0.1); end('killed')"
)
FAILED = "say(type='worker_exit', rank=0, exit_code=1, signal=None, exception=None, first=True)"
# Where the loop has to do with one machine, and whether a call is about node1.
READERS = {
    "its process": (LocalProcess, "read", lambda process: "'abcd'" in process._process.args[-1]),
    "its frames": (Frames, "feed", lambda frames, _: 0 in frames._ranks),
    "its records": (guards.Records, "take", lambda _, host, *rest: host == "node1"),
    "its ranks' words": (RunLogs, "feed", lambda _, host, *rest: host == "node1"),
    "its troubles": (
        *(Watch, "_handle_frame"),
        lambda _, guard, frame, *rest: (guard.node.host, frame.type) == ("node1", "trouble"),
    ),
    "its failure": (failures, "_answer", lambda failure, _: failure.source == "worker"),
    "its end": (LocalProcess, "wait", lambda process, *_: "'abcd'" in process._process.args[-1]),
    "what it is sent": (GuardConnection, "send", lambda guard, *_: guard.node.host == "node1"),
    "its lease": (GuardConnection, "renew", lambda guard: guard.node.host == "node1"),
}


@pytest.mark.usefixtures("settles_soon")
@pytest.mark.parametrize("name", READERS)
def test_the_loop_goes_on_whatever_a_reader_of_one_machine_raises(name, tmp_path, monkeypatch):
    """An exception that nobody foresaw, in what the loop calls for one machine."""
    owner, attribute, is_its = READERS[name]
    real, planted = getattr(owner, attribute), []

    def plant(*given):
        if is_its(*given) and not planted:
            planted.append(name)
            raise ZeroDivisionError("planted")
        return real(*given)

    monkeypatch.setattr(owner, attribute, plant)
    monkeypatch.setattr("launcher.watch.watch.RENEW_EVERY", 0.05)
    script = PLANTED.replace("{more}", FAILED if name == "its failure" else "pass")
    outcome, _ = watch(tmp_path, [script, OBEYS])
    assert planted and outcome.cause.host == "node1" and "planted" in outcome.cause.message
    assert "node2" in outcome.exits


def test_a_defect_in_a_machines_last_lines_ends_no_run(tmp_path, monkeypatch):
    close = RankLog.close
    lines_of = {"node1": lambda log: 1 / 0}
    monkeypatch.setattr(RankLog, "close", lambda log: lines_of.get(log._label[1:6], close)(log))
    say = "say(type='log', rank=task['ranks'][0], stream='stdout', bytes=1)\n"
    say += "print('x', end='', flush=True)\nend('finished')"
    outcome, _ = watch(tmp_path, [say, say])
    assert outcome.status == "finished"
    assert (tmp_path / "nodes/node2/rank1.log").read_text() == "x\n"
