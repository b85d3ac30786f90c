"""The output of commands that README and docs/ show as samples, which take a network or an hour."""

import contextlib
import io
import tempfile
from ipaddress import IPv4Address
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import paramiko

from launcher import find
from launcher.machines import ssh
from report.links import links_sentences, links_table
from report.text import wrap
from tests.messages.report import linked
from tests.unit.ansible.provision_machines import load

bootstrap, check = load("ansible/bootstrap.py"), load("ansible/check.py")
RSYNC = {
    "cause": "rsync, which copies data and wheels to it, is missing",
    "remedy": "make provision installs it",
}


def proposal(address, program, name=""):
    """The line of a server, whose key known_hosts has if it has a `name` there."""
    key = paramiko.ECDSAKey.generate()
    server = find.Server(IPv4Address(address), program, key.asbytes())
    with tempfile.TemporaryDirectory() as folder:
        known_hosts = Path(folder) / "known_hosts"
        line = f"{name} {key.get_name()} {key.get_base64()}\n" if name else ""
        known_hosts.write_text(line)
        with mock.patch.object(ssh, "KNOWN_HOSTS", (known_hosts,)):
            return find.propose_line(server, [])[1]


def host_key():
    machine = SimpleNamespace(name="pc1", address="192.168.56.111")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        bootstrap.is_confirmed(
            machine, SimpleNamespace(fingerprint="SHA256:x1"), None, lambda _question: "no"
        )
    return printed.getvalue()


def links():
    slow = linked({"12": 953.0, "13": 95.0, "23": 95.0})
    sentences = (line for text in links_sentences(slow) for line in wrap(text, ""))
    return "\n".join([*links_table(slow), *sentences])


def render():
    return {
        "make find: its key is unknown": proposal("192.168.56.111", "OpenSSH_9.2p1 Debian-2"),
        "make find: its key is known": proposal("192.168.1.12", "OpenSSH_9.2p1 Debian-2", "gauss"),
        "make bootstrap": host_key(),
        "make check": "\n".join(check.paragraph(RSYNC, 100)),
        "make plan MEASURE=1": links(),
    }
