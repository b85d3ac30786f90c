"""The line that is said while a run goes on when a wait rules it."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from contract.errors import UserError
from launcher.watch import ruling
from launcher.watch.ruling import LOOK_EVERY, REPORT_AFTER, SHARE_TOLERANCE, Ruling
from report.analysis import analyse
from report.hang import Hang, Standing
from report.read import Machine
from report.status import Follower, Judgement
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder

TOLD = "network: 0.40 s of 0.90 s a step (44 %); `make report` says what to do"
IMAGES = "images: 0.50 s of 1.00 s a step (50 %); `make report` says what to do"


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """One that waits for nothing."""
    run = RunBuilder(tmp_path_factory.mktemp("run"), nodes=2, steps=40).write()
    own = dict.fromkeys(("data", "h2d", "other", "network", "peers", "checkpoint"), 0.0)
    return replace(analyse(run).step, forward=0.2, backward=0.25, optimizer=0.05, **own)


class Run:
    """A run that is looked at every LOOK_EVERY seconds of its own clock."""

    def __init__(self, tmp_path, step):
        self.said, self.now, self.step = [], 0.0, step
        self.ruling = Ruling(tmp_path, self.said.append)

    def look(self, seconds, kind, recent=True, **waits):
        until = self.now + seconds
        while self.now < until:
            step = replace(self.step, **waits)
            found = Judgement(step, recent, kind) if kind != "nothing known" else None
            self.ruling.report_wait(self.now, found)
            self.now += LOOK_EVERY


@pytest.fixture
def run(tmp_path, step):
    return Run(tmp_path, step)


def test_each_kind_is_said_once_and_what_comes_later_too(run):
    run.look(REPORT_AFTER, "network", network=0.4)
    assert run.said == []
    run.look(120, "network", network=0.4)
    run.look(120, "compute")
    run.look(120, "network", network=0.4)
    assert run.said == [TOLD]
    run.look(120, "data", data=0.5)
    assert run.said == [TOLD, IMAGES]


@pytest.mark.parametrize(
    "between",
    [
        {"kind": "compute"},
        {"kind": "nothing known"},
        {"kind": "network", "network": 0.4, "recent": False},
        {"kind": "data", "data": 0.5},
        {"kind": "network", "network": 0.4 / (1 + 3 * SHARE_TOLERANCE)},
    ],
)
def test_two_looks_have_to_agree_with_all_between_them(run, between):
    for _ in range(10):
        run.look(LOOK_EVERY, network=0.4, kind="network")
        run.look(LOOK_EVERY, **between)
    assert run.said == []
    run.look(2 * REPORT_AFTER, "network", network=0.4)
    assert run.said == [TOLD]


def test_a_hang_is_said_once_and_that_steps_come_again(run):
    hang = Hang(15.0, [("node2", 1)], "computes")
    for seen, step in ((hang, 8), (replace(hang, seconds=20.0), 8), (None, 9)):
        run.ruling.report_hang(seen, step, False)
    assert len(run.said) == 2 and run.said[0] == hang.sentence
    assert run.ruling.hang is None
    run.ruling.report_hang(hang, 9, False)
    run.ruling.report_hang(None, 12, True)  # a rank has given up: its last steps come with its end
    assert len(run.said) == 3 and run.ruling.hang == hang


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(ruling, "LOOK_EVERY", 0.02)
    monkeypatch.setattr(ruling, "REPORT_AFTER", 0.1)


def until(true, seconds=20):
    limit = time.monotonic() + seconds
    while not true() and time.monotonic() < limit:
        time.sleep(0.01)
    return true()


def test_it_is_read_from_the_folder_by_a_thread_that_ends_with_the_run(soon, tmp_path):
    RunBuilder(tmp_path, **BOTTLENECKS["network"]).write()
    said = []
    with Ruling(tmp_path, said.append), Ruling(tmp_path / "empty", said.append):
        assert until(lambda: said)
        time.sleep(0.3)
    assert len(said) == 1 and said[0].startswith("network: 1.20 s of ")


def test_what_no_reader_foresaw_is_said_once_and_is_the_end_of_it(soon, tmp_path, monkeypatch):
    looks, said = [], []

    def look(self):
        looks.append(self)
        raise LookupError("planted")

    monkeypatch.setattr(Follower, "look", look)
    told = Ruling(tmp_path, said.append)
    with told:
        assert until(lambda: not told._thread.is_alive())
    assert len(looks) == len(said) == 1 and "planted" in said[0]


@pytest.mark.parametrize("error", [UserError("no run"), OSError("a share that is gone")])
def test_a_folder_that_cannot_be_read_now_is_looked_at_again(soon, tmp_path, monkeypatch, error):
    looks, said = [], []

    def look(self):
        looks.append(self)
        raise error

    monkeypatch.setattr(Follower, "look", look)
    with Ruling(tmp_path, said.append):
        assert until(lambda: len(looks) > 2)
    assert said == []


def test_where_a_rank_stood_stays_known_though_it_ends_in_order_once_it_is_told_to(
    soon, tmp_path, monkeypatch
):
    """A rank whose guard heard its answer just before the end is known, too."""
    stood = [Standing("node3", 2, 84.0, "is at train.py:52, in <module>")]
    asked = {"last": 15.0, "state": "T", "threads": []}
    stacks = {"kind": "stacks", "mono": 40.0, "attempt": 1, "ranks": {"0": asked, "2": asked}}
    looks = []

    def look(self):
        looks.append(self)
        self.machines = {"node1": Machine("node1", stacks=stacks)}
        nothing = dict.fromkeys(("hang", "judgement", "step", "finished"))
        return SimpleNamespace(stands=stood, silent={}, leaving=False, **nothing)

    monkeypatch.setattr(Follower, "look", look)
    watched = Ruling(tmp_path, print)
    with watched:
        assert until(lambda: len(looks) > 1)
        watched.note_stop()
    assert [(s.host, s.seconds) for s in watched.standings(1)] == [("node1", 25.0), ("node3", 84.0)]
