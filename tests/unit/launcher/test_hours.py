"""AT= and UNTIL=: which moment is meant, that nothing begins earlier, and that a run ends."""

import io
import os
import signal
import stat
import subprocess
import sys
import time
from datetime import datetime

import pytest

from contract.errors import UserError
from launcher import folders, hours
from launcher.terminal import Terminal
from tests.unit.launcher.guard_client import lives


def at(text):
    return datetime.fromisoformat(text).timestamp()


@pytest.fixture
def berlin(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("now", "text", "then"),
    [
        ("2026-11-23T17:00", "19:00", "2026-11-23T19:00"),
        ("2026-11-23T19:00", "19:00", "2026-11-24T19:00"),
        ("2026-12-31T23:59", "7:30", "2027-01-01T07:30"),
        ("2026-10-24T22:00", "07:30", "2026-10-25T07:30"),  # a night that is an hour longer
    ],
)
def test_the_next_such_time_of_day_is_meant(berlin, monkeypatch, now, text, then):
    monkeypatch.setattr(time, "time", lambda: at(now))
    assert hours.read_times(text, None) == {"at": at(then)}


@pytest.mark.parametrize("text", ["24:00", "19", "", "\u0661\u0669:00"])
def test_what_is_no_time_of_day_is_refused_by_its_name(text):
    with pytest.raises(UserError, match=f"^UNTIL={text}: type a time of day, such as 19:00"):
        hours.read_times(None, text)


def test_the_end_is_after_the_beginning(berlin, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: at("2026-11-23T17:00"))
    found = hours.read_times("19:00", "18:00")
    assert found == {"at": at("2026-11-23T19:00"), "until": at("2026-11-24T18:00")}
    assert hours.read_times(None, "18:00") == {"until": at("2026-11-23T18:00")}


class Quick(subprocess.Popen):
    """A lock that would not be given is refused within a tenth of the time."""

    def wait(self, timeout=None):
        return super().wait(timeout and timeout / 10)


@pytest.fixture
def inhibit(tmp_path, monkeypatch):
    """A stand-in for systemd-inhibit, which notes its words; `code`: what it ends with at once."""

    def make(code=None):
        program = tmp_path / "systemd-inhibit"
        then = (
            f"exit {code}"
            if code is not None
            else 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'
        )
        program.write_text(f'#!/bin/sh\necho "$$ $*" >> {tmp_path}/words\n{then}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(hours.subprocess, "Popen", Quick)
        return tmp_path / "words"

    return make


def test_while_it_waits_this_machine_stays_awake(inhibit, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    words, said = inhibit(), io.StringIO()
    begun, when = time.time(), time.time() + 0.5
    terminal = Terminal(said)
    assert hours.wait_until(when, terminal)
    terminal.drain()
    assert time.time() >= when
    pid, *asked = words.read_text().split(maxsplit=3)
    assert asked[0] == "--what=sleep:idle" and "--who=Tandem" in asked[1]
    assert not lives(int(pid))
    assert "waits until" in said.getvalue() and "may go to sleep" not in said.getvalue()
    assert not hours.wait_until(begun, terminal)  # over: nothing is said or waited for
    assert said.getvalue().count("waits until") == 1


@pytest.mark.parametrize("code", [1, None])
def test_where_it_may_fall_asleep_that_is_said(inhibit, monkeypatch, tmp_path, code):
    if code is None:
        monkeypatch.setattr(hours.shutil, "which", lambda _: None)
    else:
        inhibit(code)
    terminal = Terminal(said := io.StringIO())
    with hours.keep_awake("a run begins", terminal):
        terminal.drain()
        assert "the control node may go to sleep during the run" in said.getvalue()


def test_the_lock_ends_with_its_holder_however_that_ends(inhibit):
    words = inhibit()
    program = (
        "import io, time\nfrom launcher import hours\nfrom launcher.terminal import Terminal\n"
        "with hours.keep_awake('x', Terminal(io.StringIO())):\n"
        "    print(flush=True)\n    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child.stdout.readline()
    pid = int(words.read_text().split()[0])
    assert lives(pid)
    child.send_signal(signal.SIGKILL)
    child.wait()
    limit = time.monotonic() + 20
    while lives(pid):
        assert time.monotonic() < limit, "it holds the lock for nobody"
        time.sleep(0.05)
