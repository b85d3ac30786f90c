"""One run at a time holds a machine, by a name that the kernel grants only once."""

import os
import signal
import socket

import pytest

from launcher.node import machine_lock


@pytest.fixture(autouse=True)
def own_name(monkeypatch):
    """Not the name by which this machine's own runs exclude each other."""
    monkeypatch.setattr(machine_lock, "ALONE", f"\0tandem-test-{os.getpid()}")


def test_another_run_is_told_who_has_the_machine_until_it_is_gone():
    with (
        machine_lock.claim("a-1", "ann@desk"),
        machine_lock.claim_alone("a-1"),
        pytest.raises(machine_lock.InUse, match=r"^it is in use by ann@desk: run a-1$"),
    ):
        machine_lock.claim_alone("b")
    with machine_lock.claim_alone("b"):
        pass


def test_guards_of_one_run_share_a_machine():
    with machine_lock.claim("a b", "ann@desk"), machine_lock.claim_alone("a b"):
        assert machine_lock.claim_alone("a b") is None


def test_whoever_has_it_without_a_name_is_told_by_its_process():
    told = f"in use by process {os.getpid()}"
    with machine_lock.claim_alone("a"), pytest.raises(machine_lock.InUse, match=told):
        machine_lock.claim_alone("a")


def test_a_guard_of_the_same_run_that_has_not_come_to_listen_is_waited_for(monkeypatch):
    """Local nodes start at once: one has the name, and answers a moment later."""
    with machine_lock.claim("a", "ann@desk"), socket.socket(socket.AF_UNIX) as first:
        first.bind(machine_lock.ALONE)
        monkeypatch.setattr(machine_lock.time, "sleep", lambda _seconds: first.listen())
        assert machine_lock.claim_alone("a") is None


def test_a_name_without_a_listener_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(machine_lock.time, "sleep", lambda _seconds: None)
    with (
        socket.socket(socket.AF_UNIX) as silent,
        pytest.raises(machine_lock.InUse, match="does not say"),
    ):
        silent.bind(machine_lock.ALONE)
        machine_lock.claim_alone("a")


def test_a_listener_that_takes_no_connection_is_not_waited_for():
    """Any local user may hold the name and fill its queue: asking must not block past the lease."""
    with socket.socket(socket.AF_UNIX) as deaf, socket.socket(socket.AF_UNIX) as waiting:
        deaf.bind(machine_lock.ALONE)
        deaf.listen(0)
        waiting.connect(machine_lock.ALONE)  # the one place in the queue
        with pytest.raises(machine_lock.InUse, match="by a process that does not say its run"):
            machine_lock.claim_alone("a")


@pytest.mark.needs("root")  # to be a second user
def test_another_user_is_not_believed_to_be_a_guard_of_the_same_run():
    reader, writer = os.pipe()
    other = os.fork()
    if other == 0:
        os.setuid(65534)
        with machine_lock.claim("a", "ann@desk"), machine_lock.claim_alone("a"):
            os.write(writer, b"ready")
            signal.pause()
    try:
        assert os.read(reader, 8) == b"ready"
        told = r"^it is in use by ann@desk \(user nobody\): run a$"
        with pytest.raises(machine_lock.InUse, match=told):
            machine_lock.claim_alone("a")
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
