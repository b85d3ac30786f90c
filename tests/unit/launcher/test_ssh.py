"""Whom ssh believes, and what it takes along to a machine."""

import base64
import configparser
import contextlib
import shlex
import socket
import subprocess
import threading
import time
from pathlib import Path

import paramiko
import pytest
from fabric import Config

from launcher.engines import ssh
from launcher.engines.ssh import StrictConnection
from launcher.machines.engine import talk
from tests.unit.ansible.provision_machines import load
from tests.unit.launcher.launcher_values import host

CHECKOUT = Path(__file__).resolve().parents[3]
GENEROUS = """
Host *
    ForwardAgent yes
    ForwardX11 yes
    ForwardX11Trusted yes
    LocalForward 127.0.0.1:9999 127.0.0.1:22
    RemoteForward 9998 127.0.0.1:22
    DynamicForward 9997
    Tunnel yes
    PermitLocalCommand yes
    LocalCommand touch /tmp/owned
"""
ADDRESS = "192.0.2.7"


def ansible_options():
    parsed = configparser.ConfigParser()
    parsed.read(CHECKOUT / "ansible.cfg")
    return ["ssh", *shlex.split(parsed["ssh_connection"]["ssh_args"])]


def trial_of_a_login():
    """What `make bootstrap` calls."""
    bootstrap, seen = load("ansible/bootstrap.py"), []
    with pytest.MonkeyPatch.context() as patch:
        answer = subprocess.CompletedProcess([], 255)
        patch.setattr(bootstrap.subprocess, "run", lambda argv, **_: seen.append(argv) or answer)
        pc = bootstrap.Machine("pc1", ADDRESS, 22, "tandem-admin", "tandem")
        assert not bootstrap.needs_no_password(pc, "anna")
    return seen[0]


@pytest.mark.parametrize("calling", [ansible_options, trial_of_a_login])
def test_ssh_takes_nothing_along(tmp_path, calling):
    """Asked of ssh itself, for a user who lets everything through."""
    (tmp_path / "config").write_text(GENEROUS)
    program, *words = calling()
    argv = [program, "-G", "-F", str(tmp_path / "config"), *words, ADDRESS]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    chosen = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    names = ("forwardagent", "forwardx11", "forwardx11trusted", "permitlocalcommand")
    assert {name: chosen[name] for name in names} == dict.fromkeys(names, "no")
    assert (chosen["tunnel"], chosen["clearallforwardings"]) == ("false", "yes")
    assert chosen["stricthostkeychecking"] in ("true", "yes")


def test_fabric_does_not_forward_the_agent(tmp_path):
    (tmp_path / "config").write_text("Host *\n    ForwardAgent yes\n")
    config = Config(runtime_ssh_path=str(tmp_path / "config"))
    assert StrictConnection(ADDRESS, config=config).forward_agent is False


@pytest.fixture(scope="module")
def keys():
    return [paramiko.ECDSAKey.generate() for _ in range(3)]


@pytest.fixture
def confirmed(tmp_path, monkeypatch):
    """confirmed(bytes of known_hosts, name) -> a client that has read them."""

    def read(data, name=ADDRESS):
        (tmp_path / "known_hosts").write_bytes(data)
        monkeypatch.setattr(ssh, "KNOWN_HOSTS", (tmp_path / "known_hosts",))
        ssh.known_hosts.cache_clear()
        client = paramiko.SSHClient()
        ssh.confirm(client, name)
        ssh.known_hosts.cache_clear()
        return client

    return read


def line(key, names=ADDRESS, marker=""):
    return f"{marker}{names} {key.get_name()} {key.get_base64()}\n".encode()


def believed(client, name=ADDRESS):
    return {key.get_base64() for key in (client.get_host_keys().lookup(name) or {}).values()}


ODD = {
    "damaged base64": b"192.0.2.7 ssh-ed25519 AAAA!\n",
    "damaged key": b"192.0.2.7 ssh-ed25519 " + base64.b64encode(b"\0\0\0\x0bssh") + b"\n",
    "not UTF-8": b"caf\xe9 ssh-ed25519 AAAAC3Nz\n\xff\xfe\0\n",
    "unknown kind": b"192.0.2.7 ssh-future AAAAC3Nz\n",
    "authority": b"@cert-authority *.lab ssh-ed25519 AAAAC3Nz\n",
    "broken hash": b"|1|x|y ssh-ed25519 AAAAC3Nz\n",
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_line_hides_no_other(confirmed, keys, name):
    for data in (ODD[name] + line(keys[0]), line(keys[0]) + ODD[name]):
        assert believed(confirmed(data)) == {keys[0].get_base64()}


def test_keys_of_authorities_and_of_others_are_no_machines_keys(confirmed, keys):
    assert believed(confirmed(line(keys[0], marker="@cert-authority "))) == set()
    data = line(keys[0]) + line(keys[0], "198.51.100.*", "@revoked ")
    data += line(keys[0], f"*,!{ADDRESS}", "@revoked ")
    assert believed(confirmed(data)) == {keys[0].get_base64()}


@pytest.mark.parametrize("names", [ADDRESS, "*", "192.0.2.*", "other,192.0.2.?"])
def test_a_revoked_key_is_refused_and_that_is_said(confirmed, keys, names):
    client = confirmed(line(keys[0]) + line(keys[0], names, "@revoked "))
    assert believed(client) == set()
    with pytest.raises(ssh.Revoked) as refused:
        client._policy.missing_host_key(client, ADDRESS, keys[0])
    assert "@revoked in your known_hosts" in ssh.connection_error(host(7), refused.value)


def test_hashed_names_and_ports_are_found(confirmed, keys):
    hashed = paramiko.HostKeys.hash_host(ADDRESS)
    assert believed(confirmed(line(keys[0], hashed))) == {keys[0].get_base64()}
    name = f"[{ADDRESS}]:2222"
    assert believed(confirmed(line(keys[1], name), name), name) == {keys[1].get_base64()}
    assert believed(confirmed(line(keys[1], name))) == set()


class Deaf(paramiko.ServerInterface):
    """An sshd that lets everybody in, runs nothing and knows no window."""

    def __init__(self, stream, size):
        self.stream, self.size = stream, size

    def get_allowed_auths(self, username):
        return "none"

    def check_auth_none(self, username):
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command):
        threading.Timer(0.2, self.say, [channel]).start()  # after the answer to this
        return True

    def say(self, channel):
        message = paramiko.Message()
        message.add_byte(bytes([95 if self.stream == "stderr" else 94]))
        message.add_int(channel.remote_chanid)
        if self.stream == "stderr":
            message.add_int(1)
        message.add_string(bytes(self.size))
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while channel.transport.is_active():
                channel.transport.packetizer.send_message(message)


class Full(Deaf):
    """One on which a command ends before it has read its input."""

    def say(self, channel):
        channel.sendall(b"half of it\n")
        channel.sendall_stderr(b"the disk is full\n")
        channel.send_exit_status(1)
        channel.close()


@pytest.fixture
def deaf(confirmed, keys, monkeypatch):
    """deaf(stream, size) -> the node of a machine that sends packets of this size without end."""
    held = []

    def begin(stream, size, server_of=Deaf):
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        confirmed(line(keys[0], names=f"[127.0.0.1]:{port}"))

        def serve():
            transport = paramiko.Transport(server.accept()[0])
            held.append(transport)
            transport.add_server_key(keys[0])
            transport.start_server(threading.Event(), server_of(stream, size))

        threading.Thread(target=serve, daemon=True).start()
        node = ssh.SshNode(host(1, address="127.0.0.1", port=port))
        held.extend([server, node])
        monkeypatch.setattr(paramiko.SSHClient, "_auth", lambda self, name, *_: log_in(self, name))
        node.open()
        return node

    def log_in(client, name):
        client.get_transport().auth_none(name)

    yield begin
    for one in held:
        one.close()


@pytest.mark.parametrize(
    ("stream", "size", "most"),
    [("stdout", 30_000, 1 << 21), ("stderr", 30_000, 4096), ("stdout", 1 << 20, 0)],
    ids=["stdout", "stderr", "packet"],
)
def test_whoever_sends_more_than_the_window_loses_its_connection(deaf, stream, size, most):
    """Without limits, memory grew by 80 MiB a second for as long as nobody read."""
    node = deaf(stream, size)
    process = node.start(["true"])
    node._connection.transport.join(5)
    assert process.broken
    taken = 0
    while piece := process.read():
        taken += len(piece)
    assert taken + len(process.stderr()) <= most


def test_a_command_that_ends_before_its_input_says_why(deaf):
    """What was to be written then meets a closed channel, which is no failure of the machine."""
    process = deaf("", 0, Full).start(["tar", "x"])
    limit = time.monotonic() + 10
    while not process._channel.closed and time.monotonic() < limit:
        time.sleep(0.01)
    assert talk(process, bytes(4 << 20), 20) == (b"half of it\n", "the disk is full", 1)
