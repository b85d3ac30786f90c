"""Ways to machines: a new one is a file and its name; what one says; connections to many."""

import sys

import pytest

from contract.errors import UserError
from launcher import machines
from launcher.background import MIB
from launcher.machines import engine, inventory
from launcher.machines.engine import TimedOut, stream_output, talk
from launcher.machines.local import LocalProcess
from tests.unit.launcher.test_inventory import document

WRAPPED = """
from launcher.machines.engine import Engine

ENGINE = Engine(
    node=None,
    is_local=False,
    guard_python="/usr/bin/python3",
    repair_hint="make its image anew",
    data_hint="its image has the digits",
)
"""


def test_an_engine_is_one_new_file_and_its_name(tmp_path, monkeypatch):
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    monkeypatch.setattr(machines, "__path__", [*machines.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "launcher.machines.wrapped", raising=False)
    monkeypatch.setattr(engine, "ENGINE_NAMES", (*engine.ENGINE_NAMES, "wrapped"))
    listed = document(node1={"ansible_host": "127.0.8.1", "ansible_connection": "wrapped"})
    (one,) = inventory.parse(listed, tmp_path / "inventory.ini")
    assert one.engine.repair_hint == "make its image anew"
    with pytest.raises(UserError, match="node1 has no current folder for this relative path"):
        one.data_path("data/digits")


def python(script):
    return LocalProcess([sys.executable, "-c", script])


def test_a_command_gets_its_input_and_its_end_is_told():
    script = "import sys; print(len(sys.stdin.read())); sys.exit(3)"
    assert talk(python(script), b"x" * 3_000_000, 60) == (b"3000000\n", "", 3)
    said = "import sys; print('no'); sys.exit('it is full')"
    assert talk(python(said), b"x" * 3_000_000, 60) == (b"no\n", "it is full", 1)


def test_a_command_that_says_too_much_is_left():
    with pytest.raises(UserError, match="longer than 4 MiB"):
        talk(python("while True: print('y' * 65536)"), b"", 60)


def test_three_hundred_machines_fit_where_a_shell_allows_few_open_files(monkeypatch):
    allowed = []
    monkeypatch.setattr(engine.resource, "setrlimit", lambda _, limits: allowed.append(limits))
    monkeypatch.setattr(engine.resource, "getrlimit", lambda _: (256, 4096))
    engine.raise_file_limit(300)
    assert allowed == [(2528, 4096)]
    monkeypatch.setattr(engine.resource, "getrlimit", lambda _: (256, 512))
    with pytest.raises(UserError, match="300 machines need about 2528 open files, but"):
        engine.raise_file_limit(300)


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
        for piece in stream_output(drip, 60.0, renewal_bytes=4 * MIB):
            taken += len(piece)
            assert drip.now < 3600
    assert taken == 2 and drip.now == 118.0


def test_silence_is_counted_from_the_beginning_or_from_the_last_piece(monkeypatch):
    drip = Dripping(monkeypatch, every=0.4)
    with pytest.raises(TimedOut):
        list(stream_output(drip, 1.0))
    coming = stream_output(drip, 1.0, renewal_bytes=True)
    assert b"".join(next(coming) for _ in range(9)) == b"x" * 9


def test_what_comes_at_the_rate_that_is_asked_for_comes_whole(monkeypatch):
    drip = Dripping(monkeypatch, every=29.0, size=2 * MIB)
    coming = stream_output(drip, 60.0, renewal_bytes=4 * MIB)
    assert sum(len(next(coming)) for _ in range(100)) == 200 * MIB
    drip.data = b"x" * MIB  # half as fast
    with pytest.raises(TimedOut):
        list(coming)
