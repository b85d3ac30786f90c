"""A machine that sends a byte now and then: neither a sign of life of its guard nor a file that
comes."""

import os

import pytest

from launcher.background import MIB
from launcher.machines import engine
from launcher.machines.engine import TimedOut, stream_output
from launcher.machines.local import LocalProcess
from tests.unit.launcher.scripted_guards import watch

LOG = "say(type='log', rank=0, stream='stdout', bytes=1000000)"
DRIPS = "\nwhile True: sys.stdout.write('x'); sys.stdout.flush(); time.sleep(0.05)"
WAITS = "sys.stdin.read()"
LIE = "say(type='upgrade')\n"


@pytest.mark.parametrize(
    ("said", "status"),
    [("", "failed"), (LOG, "failed"), ("end('finished')", "finished")],
    ids=["nothing", "half a log", "exit"],
)
def test_a_byte_now_and_then_is_no_sign_of_life(tmp_path, monkeypatch, said, status):
    monkeypatch.setattr("launcher.watch.watch.SILENCE", 2.0)
    outcome, _ = watch(tmp_path, [said + DRIPS])
    assert (outcome.status, outcome.gone) == (status, ["node1"])


def test_a_machine_that_falls_silent_as_it_is_ended_hides_no_liar(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.watch.watch.SETTLE", 0.0)
    monkeypatch.setattr("launcher.watch.watch.SILENCE", 2.0)
    outcome, _ = watch(tmp_path, [WAITS, LIE + WAITS])
    assert (outcome.cause.host, outcome.cause.source) == ("node2", "guard")
    assert outcome.gone == ["node1"]


class Reopens(LocalProcess):
    """As a channel of paramiko, it has another descriptor once it was closed."""

    def close(self):
        self._stdin.close()
        self._stdout = os.fdopen(os.dup(self.fileno()), "rb")


def test_a_liar_whose_connection_is_closed_ends_no_watch(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.watch.watch.SETTLE", 0.0)
    monkeypatch.setattr("tests.unit.launcher.scripted_guards.LocalProcess", Reopens)
    outcome, _ = watch(tmp_path, [LIE + WAITS])
    assert (outcome.cause.host, outcome.cause.source) == ("node1", "guard")


class Dripping:
    """A machine that sends one byte every `every` seconds of a clock of its own."""

    def __init__(self, monkeypatch, every, size=1):
        self.now, self.every, self.data = 0.0, every, b"x" * size
        monkeypatch.setattr(engine.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(engine, "DefaultSelector", lambda: self)

    def read(self):
        return self.data

    def select(self, seconds):
        self.now += self.every
        return [self]

    def fileno(self):
        return 0

    def register(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_a_byte_now_and_then_renews_no_deadline(monkeypatch):
    drip, taken = Dripping(monkeypatch, every=59.0), 0
    with pytest.raises(TimedOut):
        for piece in stream_output(drip, 60.0, renewed=4 * MIB):
            taken += len(piece)
            assert drip.now < 3600
    assert taken == 2 and drip.now == 118.0


def test_silence_is_counted_from_the_beginning_or_from_the_last_piece(monkeypatch):
    drip = Dripping(monkeypatch, every=0.4)
    with pytest.raises(TimedOut):
        list(stream_output(drip, 1.0))
    coming = stream_output(drip, 1.0, renewed=True)
    assert b"".join(next(coming) for _ in range(9)) == b"x" * 9


def test_what_comes_at_the_rate_that_is_asked_for_comes_whole(monkeypatch):
    drip = Dripping(monkeypatch, every=29.0, size=2 * MIB)
    coming = stream_output(drip, 60.0, renewed=4 * MIB)
    assert sum(len(next(coming)) for _ in range(100)) == 200 * MIB
    drip.data = b"x" * MIB  # half as fast
    with pytest.raises(TimedOut):
        list(coming)
