"""What went wrong between this machine and another, in a sentence with a remedy."""

import contextlib
import re
import socket
import threading

import paramiko
import pytest
from paramiko.ssh_exception import NoValidConnectionsError

from launcher.machines import inventory
from launcher.machines.engine import MachineError
from launcher.machines.engines import ssh
from launcher.plan import preflight
from launcher.watch.failures import Failure, explained
from tests.unit.launcher import scripted_guards
from tests.unit.launcher.launcher_values import host


def refused(number, text):
    return NoValidConnectionsError({("192.0.2.7", 22): OSError(number, text)})


def another_key():
    shown, known = (paramiko.ECDSAKey.generate() for _ in range(2))
    return paramiko.BadHostKeyException("192.0.2.7", shown, known)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (another_key(), ["differs from the one in your known_hosts", "ssh-keygen -R 192.0.2.7"]),
        (
            paramiko.SSHException("Server '192.0.2.7' not found in known_hosts"),
            ["its host key is unknown", "make bootstrap"],
        ),
        (
            paramiko.AuthenticationException("Authentication failed."),
            ["refused to log in (Authentication failed.)", "ansible_user", "authorized_keys"],
        ),
        (
            paramiko.SSHException("No authentication methods available"),
            ["refused to log in", "make bootstrap"],
        ),
        (refused(111, "Connection refused"), ["it refuses connections", "is sshd running"]),
        (refused(113, "No route to host"), ["no way leads to it", "in the same network"]),
        (TimeoutError("timed out"), ["no answer within 8 s", "switched on"]),
        (socket.gaierror(-2, "Name or service not known"), ["no such host", "in digits"]),
        (OSError(5, "Input/output error"), ["cannot be reached: Input/output error"]),
        (EOFError(), ["it closed the connection before ssh began"]),
    ],
)
def test_each_way_to_fail_has_its_own_sentence(error, words):
    said = ssh.connection_error(host(7), error)
    assert said.startswith("node7 (tandem@192.0.2.7, port 22): ")
    assert all(word in said for word in words), said


def test_where_fewer_machines_would_do_that_is_said():
    for error in (refused(111, "Connection refused"), TimeoutError()):
        assert "NODES=<fewer> leaves out the last of the list" in ssh.connection_error(
            host(7), error
        )
    assert "NODES" not in ssh.connection_error(host(7), another_key())


def test_a_process_that_was_killed_is_no_launch_that_could_not_begin():
    lines = (
        "  exitcode  : -9 (pid: 8730)",
        "  traceback : Signal 9 (SIGKILL) received by PID 8730",
    )
    failure = Failure("pc1", "launch", 0, exit_code=1, seconds=12.3, last_lines=lines)
    said, remedy = explained(failure)
    assert said.startswith("pc1: a process of torch.distributed.launch was ended by SIGKILL after")
    assert "12 s: it was killed" in said and "could not run" not in said and "journalctl" in remedy
    itself = Failure("pc1", "launch", 0, signal="SIGKILL", seconds=12.3)
    said = explained(itself)[0]
    assert said.startswith("pc1: torch.distributed.launch was ended by SIGKILL after 12 s: it was")
    never = Failure("pc1", "launch", 0, exit_code=1, last_lines=("no such module",))
    assert "could not run torch.distributed.launch" in explained(never)[0]


FAILED = """say(type="exit", reason="failed", message=None, exit_code=None, signal="SIGKILL",
    mono_start=0.0, mono_end=1.0, workers={}, ended=[], left=[])"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "node1 lost its guard: it was killed after 0 s"),
        ("end('guard')", "node1 lost its guard: a part of its guard was killed after 0 s"),
        (FAILED, "node1: torch.distributed.launch was ended by SIGKILL after 0 s: it was killed"),
    ],
)
def test_whatever_was_killed_on_a_machine_is_named_with_the_time(tmp_path, script, said):
    outcome, _ = scripted_guards.watch(tmp_path, [script])
    assert re.sub(r"\d+ s", "0 s", explained(outcome.cause)[0]).startswith(said)


@contextlib.contextmanager
def listening(serve):
    """The port of a server that treats each connection so, until the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    serve(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def said_of(port, monkeypatch):
    monkeypatch.setattr(ssh, "BANNER_SECONDS", 1.0)
    with pytest.raises(MachineError) as caught:
        ssh.SshNode(host(7, address="127.0.0.1", port=port)).open()
    return str(caught.value)


def test_a_machine_that_hangs_up_is_not_called_frozen_and_one_that_is_frozen_is(monkeypatch):
    """By real connections: paramiko says `Error reading SSH protocol banner` of both."""
    with listening(lambda connection: connection.close()) as port:
        said = said_of(port, monkeypatch)
        assert "closed the connection before ssh began" in said and "frozen" not in said
    kept = []
    with listening(kept.append) as port:
        said = said_of(port, monkeypatch)
        assert "its ssh said nothing in 1 s: is it frozen?" in said and "closed" not in said
    said = said_of(port, monkeypatch)
    assert "it refuses connections" in said


def test_the_machines_of_the_example_are_known_as_such():
    shipped = inventory.load(inventory.CHECKOUT / "inventory.ini")
    assert {one.name: one.address for one in shipped} == inventory.EXAMPLE
    silent = {one.name: f"{one.name} is silent" for one in shipped}
    example, *others = preflight.unreached(shipped, silent)
    assert "these are the machines of the example" in example and others == ["node1 is silent"]
    some = {"node2": silent["node2"]}
    assert preflight.unreached(shipped, some) == ["node2 is silent"]
    own = [host(7)]
    assert preflight.unreached(own, {"node7": "node7 is silent"}) == ["node7 is silent"]
