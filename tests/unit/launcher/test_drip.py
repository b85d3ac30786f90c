"""A machine that sends a byte now and then: neither a sign of life of its guard, which is a pipe
here, nor a file that comes."""

import io
import os
import threading
import time

import pytest

from launcher.background import MIB
from launcher.machines import engine
from launcher.machines.engine import Late, pieces
from launcher.terminal import Stopper, Terminal
from launcher.watch.lines import RunLogs
from launcher.watch.watch import Watch
from tests.unit.launcher.launcher_values import build, facts, host

HELLO = '{"type": "hello", "protocol": 2, "way": "service"}\n'
LOG = '{"type": "log", "rank": 0, "stream": "stdout", "bytes": 1000000}\n'
EXIT = (
    '{"type": "exit", "reason": "finished", "message": null, "exit_code": 0, "signal": null, '
    '"mono_start": 0.0, "mono_end": 1.0, "workers": {}, "ended": [], "left": []}\n'
)
LIE = '{"type": "upgrade"}\n'
SECONDS = 10  # after which a guard ends by itself, so that no test waits for ever


class Says:
    """A guard that has said this; from then on it sends a byte every 0.05 s, or nothing."""

    broken = False

    def __init__(self, said, drips=False):
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.write(self._writer, said.encode())
        threading.Thread(target=self._go_on, args=[drips], daemon=True).start()

    def _go_on(self, drips):
        for _ in range(20 * SECONDS):
            if drips:
                os.write(self._writer, b"x")
            time.sleep(0.05)
        os.close(self._writer)

    def fileno(self):
        return self._reader

    def read(self):
        try:
            return os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return None

    def write(self, data):
        return len(data)

    def wait(self, seconds=0.0):
        return 0

    def stderr(self):
        return ""

    def close(self):
        pass


def watch(tmp_path, *guards):
    """The outcome of an attempt that has these guards."""
    numbers = range(1, len(guards) + 1)
    hosts = [host(n, connection="local", address="127.0.0.1") for n in numbers]
    plan = build(hosts, [facts(n) for n in numbers])
    logs = RunLogs(tmp_path, Terminal(io.StringIO()), len(guards))
    processes = {f"node{n}": guard for n, guard in zip(numbers, guards)}
    outcome = Watch(plan, processes, logs, Stopper()).run()
    logs.close()
    return outcome


@pytest.mark.parametrize(
    ("said", "status"),
    [("", "failed"), (HELLO + LOG, "failed"), (HELLO + EXIT, "finished")],
    ids=["nothing", "half a log", "exit"],
)
def test_a_byte_now_and_then_is_no_sign_of_life(tmp_path, monkeypatch, said, status):
    monkeypatch.setattr("launcher.watch.watch.SILENCE", 0.5)
    outcome = watch(tmp_path, Says(said, drips=True))
    assert (outcome.status, outcome.gone) == (status, ["node1"])


def test_a_machine_that_falls_silent_as_it_is_ended_hides_no_liar(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.watch.watch.SETTLE", 0.0)
    monkeypatch.setattr("launcher.watch.watch.SILENCE", 0.5)
    outcome = watch(tmp_path, Says(HELLO), Says(HELLO + LIE))
    assert (outcome.cause.host, outcome.cause.source) == ("node2", "guard")
    assert outcome.gone == ["node1"]


class Reopens(Says):
    """As a channel of paramiko, it has another descriptor once it was closed."""

    def close(self):
        self._other, self._reader = self._reader, os.dup(self._reader)


def test_a_liar_whose_connection_is_closed_ends_no_watch(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.watch.watch.SETTLE", 0.0)
    outcome = watch(tmp_path, Reopens(HELLO + LIE))
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
    with pytest.raises(Late):
        for piece in pieces(drip, 60.0, renewed=4 * MIB):
            taken += len(piece)
            assert drip.now < 3600
    assert taken == 2 and drip.now == 118.0


def test_silence_is_counted_from_the_beginning_or_from_the_last_piece(monkeypatch):
    drip = Dripping(monkeypatch, every=0.4)
    with pytest.raises(Late):
        list(pieces(drip, 1.0))
    coming = pieces(drip, 1.0, renewed=True)
    assert b"".join(next(coming) for _ in range(9)) == b"x" * 9


def test_what_comes_at_the_rate_that_is_asked_for_comes_whole(monkeypatch):
    drip = Dripping(monkeypatch, every=29.0, size=2 * MIB)
    coming = pieces(drip, 60.0, renewed=4 * MIB)
    assert sum(len(next(coming)) for _ in range(100)) == 200 * MIB
    drip.data = b"x" * MIB  # half as fast
    with pytest.raises(Late):
        list(coming)
