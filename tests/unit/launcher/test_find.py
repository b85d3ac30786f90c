"""`make find`: what is asked, what is proposed, and what becomes of the list of machines."""

import contextlib
import re
import socket
import threading
import time
from ipaddress import IPv4Interface

import paramiko
import pytest

from contract.errors import UserError
from launcher import cli, find
from launcher.machines import inventory, ssh

NET = "127.18.0.0/28"
INVENTORY = """# its host key is known
[cluster]
node1 ansible_host=127.18.0.1   # the first
# node9 is being mended

[cluster:vars]
ansible_user=anna
"""


class Server:
    """An ssh server, or what says something else."""

    def __init__(self, address, port, key=None, says=b""):
        self.key, self.says, self.listener = key, says, socket.create_server((address, port))
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while True:
                line, _ = self.listener.accept()
                if self.says:
                    line.sendall(self.says)
                    line.close()
                if self.key is None:
                    continue
                transport = paramiko.Transport(line)
                transport.add_server_key(self.key)
                transport.start_server(event=threading.Event(), server=paramiko.ServerInterface())


def read(path):
    """As ansible-inventory, which takes a second, reads this list."""
    machines = re.findall(r"^(\w+) ansible_host=(\S+)", path.read_text(), re.MULTILINE)
    variables = {name: {"ansible_host": address} for name, address in machines}
    return {"cluster": {"hosts": [*variables]}, "_meta": {"hostvars": variables}}


@pytest.fixture
def lan(tmp_path, monkeypatch):
    """lan(*words) -> exit code of `find` among servers; `lan.list` is the list of machines."""
    keys = [paramiko.ECDSAKey.generate() for _ in range(3)]
    with socket.create_server(("127.18.0.14", 0)) as free:
        port = free.getsockname()[1]
    servers = [Server(f"127.18.0.{n}", port, key) for n, key in enumerate(keys, 1)]
    servers.append(Server("127.18.0.5", port, says=b"220 mail.example.org ESMTP\r\n"))
    servers.append(Server("127.18.0.6", port, says=b"SSH-2.0-" + b"x" * 9999))
    servers.append(
        Server("127.18.0.7", port, says=b"SSH-2.0-\x1b[2Jevil\fpc9 ansible_host=127.0.0.1\r\n")
    )
    servers.append(Server("127.18.0.8", port))  # it never greets
    known = "".join(
        f"{names} {key.get_name()} {key.get_base64()}\n"
        for names, key in zip(("127.18.0.1,node1", "192.0.2.9,gauss"), keys)
    )
    (tmp_path / "known_hosts").write_text(known)
    (tmp_path / "pcs.ini").write_text(INVENTORY)
    monkeypatch.setattr(ssh, "KNOWN_HOSTS", (tmp_path / "known_hosts",))
    monkeypatch.setattr(find, "PORT", port)
    monkeypatch.setattr(find, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(find, "KEY_SECONDS", 20.0)
    monkeypatch.setattr(inventory, "read", read)
    monkeypatch.setattr(find, "local_interfaces", lambda: [IPv4Interface("127.18.0.4/24")])
    ssh.load_known_hosts.cache_clear()

    def run(*words):
        return cli.main(["find", f"INVENTORY={tmp_path / 'pcs.ini'}", *words])

    run.list = tmp_path / "pcs.ini"
    yield run
    ssh.load_known_hosts.cache_clear()
    for server in servers:
        server.listener.close()


def test_lines_are_shown_and_with_write_come_below_what_is_there_once(lan, capsys):
    assert lan(f"NET={NET}") == 0
    said = capsys.readouterr().out
    assert "node1 of" in said and "#pc3 ansible_host=127.18.0.3  #" in said and "\x1b" not in said
    assert lan.list.read_text() == INVENTORY
    for _ in range(2):
        assert lan(f"NET={NET}", "WRITE=1") == 0
        capsys.readouterr()
        before, _, rest = lan.list.read_text().partition("# node9 is being mended\n")
        assert before == INVENTORY.partition("# node9")[0]
        # By its key: its address is another one now.
        assert rest.startswith("gauss ansible_host=127.18.0.2  # its host key is known")
        assert rest.endswith("\n\n[cluster:vars]\nansible_user=anna\n")
    assert [host.name for host in inventory.load(lan.list)] == ["node1", "gauss"]
    text = lan.list.read_text()
    assert [text.count(name) for name in ("gauss", "#pc3", "#pc7")] == [1, 1, 1]
    assert "\x1b" not in text and "\f" not in text


@pytest.mark.parametrize(
    ("net", "why"),
    [
        ("", "(this machine is in 127.18.0.0/24)"),
        ("pc3", "write it like NET=192.168.1.0/24"),
        ("127.16.0.0/12", "has 1,048,576 addresses: type a network of at most 1,024"),
        ("8.8.8.0/24", "searches only a network of this machine"),
    ],
)
def test_what_is_not_this_lan_is_refused_before_any_address_is_asked(lan, monkeypatch, net, why):
    monkeypatch.setattr(find, "ask_address", None)
    monkeypatch.setattr(cli.terminal, "show", lambda text, _stream: told.append(text))
    told = []
    assert lan(f"NET={net}") == 2
    assert why in told[0]


def test_addresses_that_are_silent_are_asked_at_once(monkeypatch):
    """64 of them: whatever each takes, all together take little more."""
    asked, now, most = [], set(), []

    def connect(address, _seconds):
        asked.append(address)
        now.add(address)
        most.append(len(now))
        time.sleep(0.02)
        now.remove(address)
        raise TimeoutError

    monkeypatch.setattr(find.socket, "create_connection", connect)
    monkeypatch.setattr(find, "local_interfaces", lambda: [IPv4Interface("10.7.0.1/16")])
    monkeypatch.setattr(find.inventory, "load", lambda _path: [])
    assert find.find("10.7.4.0/22", "inventory.ini", False) == 0
    assert len(asked) == len({*asked}) == 1022 and {port for _, port in asked} == {22}
    assert 32 < max(most) <= 64


def test_a_list_without_the_group_is_left_alone(tmp_path):
    with pytest.raises(UserError, match=r"no line \[cluster\]"):
        find.add_lines("all:\n  hosts:\n", ["pc1"], tmp_path / "pcs.yml")
