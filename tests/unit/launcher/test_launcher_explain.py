"""What went wrong between this machine and another, in a sentence with a remedy."""

import paramiko
import pytest
from paramiko.ssh_exception import NoValidConnectionsError

from launcher.engines import ssh
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
        (refused(111, "Connection refused"), ["Connection refused: is sshd running"]),
        (refused(113, "No route to host"), ["No route to host", "in the same network"]),
        (TimeoutError("timed out"), ["no answer within 8 s", "switched on"]),
        (paramiko.SSHException("Error reading SSH protocol banner"), ["is it frozen"]),
        (OSError(5, "Input/output error"), ["cannot be reached: Input/output error"]),
        (EOFError(), ["cannot be reached: EOFError"]),
    ],
)
def test_each_way_to_fail_has_its_own_sentence(error, words):
    said = ssh.explain(host(7), error)
    assert said.startswith("node7 (tandem@192.0.2.7, port 22): ")
    assert all(word in said for word in words), said


def test_where_fewer_machines_would_do_that_is_said():
    for error in (refused(111, "Connection refused"), TimeoutError()):
        assert "`make train NODES=...` takes fewer machines" in ssh.explain(host(7), error)
    assert "NODES" not in ssh.explain(host(7), another_key())
