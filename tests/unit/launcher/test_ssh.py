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

from contract.errors import UserError
from launcher.machines import inventory, ssh
from launcher.machines import route as routes
from launcher.machines.engine import MachineError, talk
from launcher.machines.route import Route
from launcher.machines.ssh import StrictConnection
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
    KnownHostsCommand /bin/true
    VerifyHostKeyDNS yes
    NoHostAuthenticationForLocalhost yes
    GSSAPIDelegateCredentials yes
    ControlPath /tmp/of-the-user
IgnoreUnknown Of*
OfAnotherSsh yes
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


@pytest.fixture
def config(tmp_path, monkeypatch):
    """config(text) -> the file that every ssh of ours is given, with this as ~/.ssh/config."""

    def write(text):
        own, ours = tmp_path / "config", tmp_path / "ssh_config"
        own.write_text(text)
        shipped = (CHECKOUT / "ansible/ssh_config").read_text()
        assert shipped.count("~/.ssh/config\n") == 1
        ours.write_text(shipped.replace("~/.ssh/config\n", f"{own}\n"))
        monkeypatch.setattr(routes, "SSH", ("ssh", "-F", str(ours)))
        return str(ours)

    return write


@pytest.mark.parametrize("calling", [ansible_options, trial_of_a_login])
def test_ssh_takes_nothing_along(config, calling):
    """Asked of ssh itself, for a user who lets everything through."""
    words = [config(GENEROUS) if word.endswith("/ssh_config") else word for word in calling()]
    argv = [words[0], "-G", *words[1:], ADDRESS]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    chosen = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    names = ("forwardagent", "forwardx11", "forwardx11trusted", "permitlocalcommand")
    assert {name: chosen[name] for name in names} == dict.fromkeys(names, "no")
    assert (chosen["tunnel"], chosen["clearallforwardings"]) == ("false", "yes")
    assert chosen["stricthostkeychecking"] in ("true", "yes")
    names = ("verifyhostkeydns", "nohostauthenticationforlocalhost", "gssapidelegatecredentials")
    assert {chosen[name] for name in names} <= {"no", "false"}
    assert {chosen.get(name, "none") for name in ("knownhostscommand", "controlpath")} == {"none"}


def test_fabric_forwards_no_agent_and_reads_no_configuration(monkeypatch):
    monkeypatch.setattr(Config, "_load_ssh_file", lambda *_: 1 / 0)
    assert StrictConnection(ADDRESS, 22, Route()).forward_agent is False


@pytest.fixture(scope="module")
def keys():
    return [paramiko.ECDSAKey.generate() for _ in range(3)]


@pytest.fixture
def confirmed(tmp_path, monkeypatch):
    """confirmed(bytes of known_hosts, name) -> a client that has read them."""

    def read(data, name=ADDRESS):
        (tmp_path / "known_hosts").write_bytes(data)
        monkeypatch.setattr(ssh, "KNOWN_HOSTS", (tmp_path / "known_hosts",))
        ssh.load_known_hosts.cache_clear()
        client = paramiko.SSHClient()
        ssh.set_confirmed_keys(client, name, Route())
        ssh.load_known_hosts.cache_clear()
        return client

    return read


def line(key, names=ADDRESS, marker=""):
    return f"{marker}{names} {key.get_name()} {key.get_base64()}\n".encode()


def believed(client, name=ADDRESS):
    return {key.get_base64() for key in (client.get_host_keys().lookup(name) or {}).values()}


ODD = {
    "damaged key": b"192.0.2.7 ssh-ed25519 " + base64.b64encode(b"\0\0\0\x0bssh") + b"\n",
    "not UTF-8": b"caf\xe9 ssh-ed25519 AAAAC3Nz\n\xff\xfe\0\n",
    "authority": b"@cert-authority *.lab ssh-ed25519 AAAAC3Nz\n",
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


@pytest.mark.parametrize("names", [ADDRESS, "other,192.0.2.?"])
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


class Open(paramiko.ServerInterface):
    """An sshd that lets everybody in, says its name and connects on to others."""

    def __init__(self, name):
        self.name, self.onward = name, {}

    def get_allowed_auths(self, username):
        return "none"

    def check_auth_none(self, username):
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED

    def check_channel_direct_tcpip_request(self, chanid, origin, destination):
        self.onward[chanid] = socket.create_connection(destination)
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command):
        def say():
            channel.sendall(self.name.encode())
            channel.send_exit_status(0)
            channel.close()

        threading.Timer(0.05, say).start()  # after the answer to this
        return True


def threaded(function, *words):
    threading.Thread(target=function, args=words, daemon=True).start()


def serve(server, key, own, held):
    with contextlib.suppress(OSError):  # until it is closed
        while True:
            transport = paramiko.Transport(server.accept()[0])
            held.append(transport)
            transport.add_server_key(key)
            transport.start_server(threading.Event(), own)
            threaded(connect_on, transport, own)


def connect_on(transport, own):
    while transport.is_active():
        if (channel := transport.accept(1)) and channel.get_id() in own.onward:
            other = own.onward.pop(channel.get_id())
            threaded(pump, channel, other)
            threaded(pump, other, channel)


def pump(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    target.close()


@pytest.fixture
def sshds(keys, monkeypatch):
    """sshds(count) -> the ports of so many sshds; the n-th one's key is keys[n]."""
    held = []

    def begin(count):
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        held.extend(servers)
        for number, server in enumerate(servers):
            threaded(serve, server, keys[number], Open(f"machine {number}"), held)
        return [server.getsockname()[1] for server in servers]

    def log_in(client, name, *_):
        client.get_transport().auth_none(name)

    monkeypatch.setattr(paramiko.SSHClient, "_auth", log_in)
    yield begin
    for one in held:
        one.close()


CONFIG = """
Host pc*
    HostName 127.0.0.1
    Port {0}
    ProxyJump {jumps}
Host gate
    Port {1}
Host inner
    Port {2}
Host gate inner
    HostName 127.0.0.1
    StrictHostKeyChecking no
    KnownHostsCommand {file}.sh
Host *
    UserKnownHostsFile {file}
"""


@pytest.fixture
def way(config, sshds, keys, tmp_path):
    """way(jumps, known keys) -> a node of inventory `pc1`, behind these hops."""

    def make(jumps, known=(0, 1, 2), **variables):
        ports, file = sshds(3), tmp_path / "confirmed"
        file.write_bytes(b"".join(line(keys[n], f"[127.0.0.1]:{ports[n]}") for n in known))
        vouch = file.with_name("confirmed.sh")  # for every key, as a user may for one hop
        lines = "".join(line(keys[n], f"[127.0.0.1]:{ports[n]}").decode() for n in range(3))
        vouch.write_text(f"#!/bin/sh\ncat <<END\n{lines}END\n")
        vouch.chmod(0o700)
        config(CONFIG.format(*ports, jumps=jumps, file=file))
        return inventory.parse(listed("pc1", **variables), Path("machines.ini"))[0]

    return make


def listed(name, **variables):
    return {"cluster": {"hosts": [name]}, "_meta": {"hostvars": {name: variables}}}


@pytest.mark.parametrize("jumps", ["none", "gate,inner"])
def test_a_machine_is_reached_as_ssh_s_own_configuration_says(way, jumps):
    """By its Port, and over its hops: Ansible's ssh reads the same."""
    node = ssh.SshNode(way(jumps))
    node.open()
    assert talk(node.start(["true"]), b"", 5) == (b"machine 0", "", 0)
    node.close()
    assert (node._connection._proxy is None) == (jumps == "none")


def test_a_hop_with_an_unknown_key_is_refused_even_where_the_user_would_not(way):
    node = ssh.SshNode(way("gate,inner", (0, 1)))
    with pytest.raises(MachineError, match=r"through gate.*ost key verification failed"):
        node.open()
    assert node._connection._proxy.returncode is not None


def test_the_machine_behind_a_hop_needs_a_known_key_of_its_own(way):
    with pytest.raises(MachineError, match="its host key is unknown"):
        ssh.SshNode(way("gate", (1, 2))).open()


def test_the_inventory_s_port_and_hop_win(way):
    pc = way("gate", ansible_port=4022, ansible_ssh_common_args="-o ProxyJump=inner")
    assert (pc.port, pc.route.hops, pc.address) == (4022, "inner", "127.0.0.1")


@pytest.mark.parametrize(
    "own",
    ["Match host pc1\n Port 4022\n HostKeyAlias pc-one", "Include FOLDER/more"],
    ids=["Match", "Include"],
)
def test_match_and_include_count(config, tmp_path, own):
    (tmp_path / "more").write_text("Host pc*\n Port 4022\n HostKeyAlias pc-one\n")
    config(own.replace("FOLDER", str(tmp_path)))
    found = routes.find_route("pc1", [])
    assert (found.port, found.key_name) == (4022, "pc-one")


@pytest.mark.parametrize(
    ("own", "variables", "word"),
    [
        ("ProxyCommand nc %h %p", {}, "proxycommand"),
        ("RevokedHostKeys /etc/revoked", {}, "revokedhostkeys"),
        ("Port many", {}, "Bad port"),
        ("", {"ansible_ssh_common_args": "-o StrictHostKeyChecking=no"}, "StrictHostKeyChecking"),
        ("", {"ansible_ssh_args": "-C"}, "ansible_ssh_args"),
    ],
)
def test_what_would_not_be_strict_is_refused_by_name(config, monkeypatch, own, variables, word):
    """Also for verbs of Ansible's."""
    config(f"{own}\n")
    document = listed("pc1", ansible_host=ADDRESS, **variables)
    with pytest.raises(UserError, match=f"pc1: .*{word}"):
        inventory.parse(document, Path("machines.ini"))
    monkeypatch.setattr(inventory, "read", lambda _: document)
    with pytest.raises(UserError, match=f"pc1: .*{word}"):
        inventory.check(Path("machines.ini"))


WORDS = ["two\nlines!", "a!b", "it's", "100%", "\\n\t", "$HOME `id`", "{a,b} * ~ #", "", "é"]


def test_no_login_shell_finds_anything_to_read_in_a_command():
    """csh ends a quote with its line, and looks for a ! within quotes, too."""
    line = ssh.quote_for_any_shell(["printf", "%s|", *WORDS])
    assert line.count("'") == 2 and not {"\n", "!"} & set(line) and line.isascii()
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split("|") == [*WORDS, ""]
