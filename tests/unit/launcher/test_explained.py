"""What went wrong between this machine and another, in a sentence with a remedy."""

import contextlib
import re
import socket
import threading

import pytest

from contract.errors import UserError
from launcher import look
from launcher.machines import inventory, ssh
from launcher.machines.engine import MachineError
from launcher.watch.failures import explain_failure
from tests.unit.launcher import scripted_guards
from tests.unit.launcher.launcher_values import host

FAILED = """say(type="exit", reason="failed", message=None, exit_code=None, signal="SIGKILL",
    mono_start=0.0, mono_end=1.0, workers={}, ended=[], left=[])"""

GUARD_ENDED = "the guard on node1, the process that watches the ranks, ended"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", f"{GUARD_ENDED}: it was killed after 0 s"),
        ("end('guard')", f"{GUARD_ENDED}: a part of its guard was killed"),
        (FAILED, "node1: torch.distributed.launch was ended by SIGKILL after 0 s"),
    ],
)
def test_whatever_was_killed_on_a_machine_is_named_with_the_time(tmp_path, script, said):
    outcome, _ = scripted_guards.watch(tmp_path, [script])
    assert re.sub(r"\d+ s", "0 s", explain_failure(outcome.cause)[0]).startswith(said)


def said_of(port):
    with pytest.raises(MachineError) as caught:
        ssh.SshNode(host(7, address="127.0.0.1", port=port)).open()
    return str(caught.value)


def test_a_machine_that_hangs_up_is_not_called_frozen_and_one_that_is_frozen_is(
    monkeypatch, caplog
):
    """By real connections: paramiko says `Error reading SSH protocol banner` of both."""
    monkeypatch.setattr(ssh, "BANNER_SECONDS", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = said_of(port)  # the kernel takes the connection, and nobody is there
        assert "is the machine frozen?" in said and "closed" not in said

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        said = said_of(port)
        assert "closed the connection before ssh began" in said and "frozen" not in said
        server.shutdown(socket.SHUT_RDWR)
    assert "it refuses connections" in said_of(port)
    assert caplog.records == []  # a logger without handlers prints on the terminal


def test_the_machines_of_the_example_are_known_as_such(monkeypatch):
    def refusal(hosts, failures):
        monkeypatch.setattr(look.engine, "open_all", lambda _: ({}, failures))
        with pytest.raises(UserError) as refused:
            look.open_and_probe(hosts, None)
        return refused.value.problems

    listed = (inventory.CHECKOUT / "inventory.ini").read_text()
    shipped = dict(re.findall(r"^(node\d) ansible_host=(\S+)", listed, re.MULTILINE))
    assert shipped == inventory.EXAMPLE
    hosts = [host(int(name[4:]), address=address) for name, address in shipped.items()]
    silent = {name: f"{name} is silent" for name in shipped}
    example, *others = refusal(hosts, silent)
    assert "the inventory lists the sample machines" in example and others == ["node1 is silent"]
    assert [*refusal(hosts, {"node2": "node2 is silent"})] == ["node2 is silent"]
    assert [*refusal([host(7)], {"node7": "node7 is silent"})] == ["node7 is silent"]
