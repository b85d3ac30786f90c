"""Reaches machines by ssh, as an Engine (engine.py), and checks host keys strictly.

Fabric makes the connections. Fabric accepts unknown host keys, so `StrictConnection` replaces that
policy: Tandem refuses a machine whose key is not in the user's known_hosts. route.py asks OpenSSH
for the route to a machine.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import re
import shlex
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import paramiko
from fabric import Config, Connection
from paramiko.buffered_pipe import BufferedPipe
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.packet import Packetizer

from contract.text import clean
from launcher.machines.engine import STATUS_SECONDS, Engine, Host, MachineError
from launcher.machines.route import Route

# The time for a TCP connection, for the first line of the ssh server, and for the login. The kernel
# of a frozen machine still accepts connections, so the first limit alone does not suffice.
CONNECT_SECONDS, BANNER_SECONDS, LOGIN_SECONDS = 8.0, 12.0, 20.0
# paramiko's reader threads wake ten times a second to see whether they were closed. With hundreds
# of hosts this takes most of a core. Here they wake rarely: SshNode.close shuts the socket down,
# which wakes its thread.
READER_WAKES_EVERY = 5.0
TCP_THIN_LINEAR_TIMEOUTS = 16  # in linux/tcp.h
# paramiko logs a traceback if a machine does not answer. connection_error has a sentence instead.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)
UNSAFE = re.compile(rb"[^\w ./:=,@+-]")  # bytes that may have a meaning in some shell
# sshd sends no larger packet, and the protocol requires only 35,000 bytes (RFC 4253, 6.1).
MAX_PACKET_BYTES = 256 << 10
# Of one read of stdout, and of one read of stderr or one write.
READ_BYTES, CHUNK_BYTES = 1 << 18, 1 << 16
STDERR_BYTES = 4096  # of a command's stderr that are kept: its end says why the command failed
STDERR_READS = 16  # at most, for each read of stdout
# The files that ssh reads by default, for a Route that names none.
KNOWN_HOSTS = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))


class StrictConnection(Connection):
    """Connects by a route (route.py), and refuses host keys that the user has not confirmed. Fabric
    itself reads no ssh_config here. No agent is forwarded: a node must not use the user's keys."""

    # Declared here, because Fabric would store other attributes in its configuration.
    route = Route()
    _proxy: subprocess.Popen[bytes] | None = None
    _proxy_stderr: IO[bytes] | None = None

    def __init__(self, host: str, port: int, route: Route, **kwargs: Any):
        super().__init__(host, port=port, config=_config(), forward_agent=False, **kwargs)
        self.route, self.gateway = route, route.hops or None
        name = host if port == 22 else f"[{host}]:{port}"
        set_confirmed_keys(self.client, name, route)

    def open_gateway(self) -> socket.socket:
        """Return a socket that is connected to the machine through its jump hosts. Fabric calls
        this if `gateway` is set. A process of OpenSSH connects, with the same strict options."""
        local_end, ssh_end = socket.socketpair()
        self._proxy_stderr = tempfile.TemporaryFile()  # noqa: SIM115
        with ssh_end:
            self._proxy = subprocess.Popen(
                self.route.proxy(self.host, self.port),
                stdin=ssh_end.fileno(),
                stdout=ssh_end.fileno(),
                stderr=self._proxy_stderr,
                start_new_session=True,  # Ctrl-C does not reach ssh, which cannot ask either
            )
        return local_end

    def gateway_error(self) -> str:
        """Return the error of OpenSSH about the jump hosts, or an empty string."""
        if self._proxy_stderr is None:
            return ""
        self._proxy_stderr.seek(0)
        words = self._proxy_stderr.read(4096).decode(errors="replace").split()
        return clean(" ".join(words))[:300].rstrip(".")

    def close(self) -> None:
        super().close()
        if self._proxy is not None:
            self._proxy.terminate()
            self._proxy.wait()


class Packets(Packetizer):
    """Refuses a packet that claims to be too large, before paramiko stores it in memory."""

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        if n > MAX_PACKET_BYTES:
            raise paramiko.SSHException(f"its ssh sent a packet of {n} bytes")
        data: bytes = super().read_all(n, check_rekey)
        return data


class LimitedPipe(BufferedPipe):
    """Holds the unread output of a command, at most `max_bytes`. paramiko itself stores everything
    that a machine sends, even beyond the window that ssh allows."""

    def __init__(self, max_bytes: int):
        super().__init__()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> None:
        if len(self) + len(data) > self._max_bytes:
            raise paramiko.SSHException(
                f"its ssh sent more than the {self._max_bytes} bytes it may"
            )
        super().feed(data)


class SshProcess:
    """Runs a command on another machine. Its methods are described in engine.Process."""

    def __init__(self, channel: paramiko.Channel):
        self._channel = channel
        self._stderr = b""
        channel.setblocking(False)

    def fileno(self) -> int:
        return self._channel.fileno()

    def read(self) -> bytes | None:
        for _ in range(STDERR_READS):  # endless output on stderr must not delay stdout
            if not self._channel.recv_stderr_ready():
                break
            stderr = self._stderr + self._channel.recv_stderr(CHUNK_BYTES)
            self._stderr = stderr[-STDERR_BYTES:]
        try:
            return self._channel.recv(READ_BYTES)
        except socket.timeout:
            return None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self._channel.send(bytes(data[:CHUNK_BYTES]))
        except socket.timeout:
            return 0
        except OSError as error:  # the channel is closed: the command ended before it read all
            raise BrokenPipeError(str(error)) from None

    def close_stdin(self) -> None:
        self._channel.shutdown_write()

    def wait(self, seconds: float = STATUS_SECONDS) -> int:
        # recv_exit_status() would wait for ever if the machine died after its output. Without a
        # status, paramiko's exit_status is -1.
        self._channel.status_event.wait(seconds)
        return self._channel.exit_status

    def stderr(self) -> str:
        return self._stderr.decode(errors="replace").strip()

    @property
    def broken(self) -> bool:
        return not self._channel.transport.is_active()

    def close(self) -> None:
        self._channel.close()


class SshNode:
    """Holds the ssh connection to one machine."""

    def __init__(self, host: Host):
        self.host = host
        key_files = [Path(file).expanduser() for file in host.route.identity_files]
        self._connection = StrictConnection(
            host.address,
            host.port,
            host.route,
            user=host.user or host.route.user or None,
            connect_timeout=CONNECT_SECONDS,
            connect_kwargs={
                "banner_timeout": BANNER_SECONDS,
                "auth_timeout": LOGIN_SECONDS,
                # As ssh does: the route's keys, or else those in the usual files.
                "key_filename": [str(path) for path in key_files if path.is_file()],
                "look_for_keys": not host.route.identity_files,
                "transport_factory": partial(paramiko.Transport, packetizer_class=Packets),
            },
        )

    def open(self) -> None:
        """Connect and log in. Raises MachineError with the error of ssh and a remedy."""
        try:
            self._connection.open()
        except Exception as error:
            self._connection.close()
            host, text = self.host, connection_error(self.host, error)
            if gateway_error := self._connection.gateway_error():
                text = (
                    f"{host.name} ({host.address}) is reached through {host.route.hops} "
                    f"(ProxyJump), which fails: {gateway_error}: log in to each jump host "
                    "once with `ssh`, and compare its key."
                )
            raise MachineError([host.name], text) from error
        sock = self._connection.transport.sock
        sock.settimeout(READER_WAKES_EVERY)
        # After each loss TCP doubles its retransmission timeout. With this option TCP does not, for
        # streams with few packets, so leases are renewed soon after a stall. The socket to a jump
        # host's process is no TCP socket and raises OSError.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1)

    def start(self, argv: list[str]) -> SshProcess:
        """Run a command. Raises MachineError if the connection to the machine broke."""
        try:
            channel = self._connection.transport.open_session(timeout=CONNECT_SECONDS)
            # The buffers can be replaced now, because sshd sends no output before the command.
            channel.in_buffer = LimitedPipe(channel.in_window_size)
            channel.in_stderr_buffer = LimitedPipe(channel.in_window_size)
            channel.exec_command(quote_for_any_shell(argv))
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise MachineError([self.host.name], connection_error(self.host, error)) from error
        return SshProcess(channel)

    def close(self) -> None:
        # The shutdown wakes paramiko's thread, which wakes by itself only every READER_WAKES_EVERY.
        transport = self._connection.transport
        if transport is None:
            return
        with contextlib.suppress(OSError):
            transport.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def quote_for_any_shell(argv: list[str]) -> str:
    """Return a command line that runs `argv` in any login shell, also in csh and fish."""
    # sshd passes the command line to the user's login shell. csh allows no newline within quotes,
    # and replaces ! even within quotes. So all bytes that a shell may interpret become octal
    # numbers, which sh decodes: `echo a!` becomes
    #     exec sh -c 'eval "$(printf %b "exec echo \0047a\0041\0047")"'
    command = ("exec " + shlex.join(argv)).encode(errors="surrogateescape")
    encoded = UNSAFE.sub(lambda byte: b"\\0%03o" % byte[0][0], command).decode()
    return f'exec sh -c \'eval "$(printf %b "{encoded}")"\''


@lru_cache(maxsize=1)
def _config() -> Config:
    """Return Fabric's settings for all connections: route.py has read ssh_config already."""
    return Config(overrides={"load_ssh_configs": False})


def connection_error(host: Host, error: Exception) -> str:
    """Return a sentence about an error while connecting to a machine, with a remedy."""
    target = f"{host.name} ({host.user + '@' if host.user else ''}{host.address}, port {host.port})"
    text = _describe_error(error)
    if isinstance(error, paramiko.BadHostKeyException):
        return (
            f"{target}: its host key differs from the key in your known_hosts. If the machine "
            f"was reinstalled, run `ssh-keygen -R {host.address}` and `make bootstrap`. "
            "Otherwise another machine answers at this address."
        )
    if isinstance(error, Revoked):
        return (
            f"{target}: its host key is marked @revoked in your known_hosts: on that machine, "
            "remove /etc/ssh/ssh_host_* and type `sudo ssh-keygen -A`, then run `make "
            "bootstrap`."
        )
    if isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error):
        return (
            f"{target}: its host key is unknown (not in your ~/.ssh/known_hosts): run `make "
            "bootstrap`, which shows the key and asks you."
        )
    # paramiko raises an SSHException with this text if the user has no key.
    is_refused = "No authentication methods" in str(error)
    if isinstance(error, paramiko.AuthenticationException) or is_refused:
        return (
            f"{target}: ssh could not log in ({text}): check train_user and ansible_user in "
            "the inventory, and check that this user's authorized_keys has your key (`make "
            "bootstrap` adds it)."
        )
    # The remaining errors come from the network, or from an ssh server that does not answer. Many
    # of them can be told apart only by their text.
    timeouts = (socket.timeout, TimeoutError)
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        text = "; ".join(sorted({_describe_error(cause) for cause in error.errors.values()}))
    reason = text
    # `__context__` is the error because of which paramiko raised this one.
    if "protocol banner" in text and isinstance(error.__context__, timeouts):
        reason = (
            "it accepts connections, but its ssh server sent nothing for "
            f"{BANNER_SECONDS:.0f} s: is the machine frozen?"
        )
    elif "protocol banner" in text or isinstance(error, (EOFError, ConnectionResetError)):
        reason = (
            "it closed the connection before ssh began: is it this machine's address, and sshd's "
            "port? (sshd itself does so with MaxStartups, and if its settings refuse this "
            "address.)"
        )
    elif isinstance(error, socket.gaierror):
        reason = (
            f"there is no such host ({text}): correct ansible_host, or write its numeric address"
        )
    elif isinstance(error, timeouts) or "timed out" in text:
        reason = f"no answer within {CONNECT_SECONDS:.0f} s: is it switched on and plugged in?"
    elif "No route" in text or "unreachable" in text:
        reason = (
            f"the network has no route to it ({text}): is it switched on, and in the same network?"
        )
    elif "refused" in text:
        reason = f"it refuses connections ({text}): is sshd running there, on this port?"
    return (
        f"{target}: cannot be reached: {reason} (a smaller NODES omits the last machines of "
        "the list)."
    )


def _describe_error(error: Exception) -> str:
    """Return an error's text as one line, or the error's type if it has no text."""
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__


class Revoked(paramiko.SSHException):
    """Says that a machine showed a key that a known_hosts file marks as @revoked."""


@dataclass(frozen=True)
class KnownHost:
    """Holds a line of a known_hosts file: a key, and patterns of the machines' names."""

    entry: HostKeyEntry
    is_revoked: bool

    def matches(self, name: str) -> bool:
        """Return whether the line is for this name, by the rules of sshd(8): a pattern may have `*`
        and `?`, `!` excludes names, and `|1|...` is a hash of a name."""
        # paramiko's lookup compares hashes and plain names, but no patterns. Its `add` would accept
        # only one name, hence the private list.
        keys = paramiko.HostKeys()
        keys._entries.append(self.entry)
        if keys.lookup(name) is not None:
            return True
        patterns = self.entry.hostnames
        excluded = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
        if any(_matches_pattern(name, pattern) for pattern in excluded):
            return False
        included = [pattern for pattern in patterns if pattern[:1] not in ("!", "|")]
        return any(_matches_pattern(name, pattern) for pattern in included)


def _matches_pattern(name: str, pattern: str) -> bool:
    # fnmatch gives brackets a meaning. In [192.0.2.1]:2222 they have none.
    return fnmatch.fnmatchcase(name.lower(), pattern.lower().replace("[", "[[]"))


def read_known_hosts(data: bytes) -> list[KnownHost]:
    """Return the usable lines of a known_hosts file of OpenSSH."""
    # A line is `[@revoked] patterns key-type key [comment]`. The loop skips lines that are damaged,
    # not in UTF-8, for a certificate authority, or with an unknown type of key. paramiko would stop
    # reading at some of these lines.
    lines = []
    for line in data.split(b"\n"):
        try:
            words = line.decode("utf-8").split()
        except UnicodeDecodeError:
            continue
        marker = words.pop(0) if words and words[0].startswith("@") else None
        if not words or words[0].startswith("#") or marker not in (None, "@revoked"):
            continue
        try:
            entry = HostKeyEntry.from_line(" ".join(words))
            if entry is None or entry.key is None:
                continue
            known_host = KnownHost(entry, is_revoked=marker is not None)
            known_host.matches("")  # raises an error if the hash of the name is damaged
        except (paramiko.SSHException, InvalidHostKey, ValueError, IndexError, AssertionError):
            continue
        lines.append(known_host)
    return lines


@lru_cache(maxsize=16)
def load_known_hosts(paths: tuple[Path, ...]) -> tuple[KnownHost, ...]:
    """Return the usable lines of these files, which are read once for all hosts."""
    lines = []
    for path in paths:
        with contextlib.suppress(OSError):
            lines += read_known_hosts(path.expanduser().read_bytes())
    return tuple(lines)


def set_confirmed_keys(client: paramiko.SSHClient, name: str, route: Route) -> None:
    """Make a client accept only the keys that known_hosts has for a machine. Its names there are
    `name` (an address, or [address]:port) and the name that ssh uses (route.key_name)."""
    paths = tuple(map(Path, route.known_hosts)) or KNOWN_HOSTS
    names = {name, route.key_name or name}
    lines = [line for line in load_known_hosts(paths) if any(map(line.matches, names))]
    # As in OpenSSH, a key that one line revokes is refused, even if another line confirms it.
    revoked_keys = {line.entry.key.asbytes() for line in lines if line.is_revoked}
    for line in lines:
        key = line.entry.key
        if not line.is_revoked and key.asbytes() not in revoked_keys:
            client.get_host_keys().add(name, key.get_name(), key)
    client.set_missing_host_key_policy(RefuseUnconfirmed(revoked_keys))


class RefuseUnconfirmed(paramiko.RejectPolicy):
    """Refuses a machine without a confirmed key. Raises Revoked if a known_hosts file revokes the
    machine's key."""

    def __init__(self, revoked_keys: set[bytes]):
        self.revoked_keys = revoked_keys

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        if key.asbytes() in self.revoked_keys:
            raise Revoked(f"the key of {hostname} was revoked")
        super().missing_host_key(client, hostname, key)


ENGINE = Engine(
    node=SshNode,
    is_local=False,
    guard_python="/usr/bin/python3",
    repair_hint="run `make provision`",
    data_hint="`make provision` copies the digits; for your own images type DATA=/<folder>",
)
