"""A machine whose kernel takes connections while nothing behind it answers: frozen, or swapping."""

import socket

import pytest

from contract.errors import UserError
from launcher.machines.engines import ssh
from tests.unit.launcher.launcher_values import host


def test_a_frozen_machine_is_a_sentence_and_no_traceback(monkeypatch, caplog):
    monkeypatch.setattr(ssh, "BANNER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        port = frozen.getsockname()[1]
        node = ssh.SshNode(host(1, address="127.0.0.1", port=port))
        with pytest.raises(UserError, match="is it frozen"):
            node.open()
        node.close()
    assert caplog.records == []  # a logger without handlers prints on the terminal
