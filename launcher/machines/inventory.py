"""The machines, as `ansible-inventory --list` gives them: there is no second host file."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract import layout, machines
from contract.errors import UserError
from contract.machines import GROUP
from contract.options import Config
from launcher.machines import engine, owned, route
from launcher.machines.engine import Host
from launcher.machines.route import Route

PLAIN = re.compile(r"\w[\w.-]*")  # in a pattern of Ansible: a name, rather than pc*, !pc3 or @file
# The machines of inventory.ini as it comes, which are the lab's, too.
EXAMPLE = {f"node{number}": f"192.168.56.{110 + number}" for number in range(1, 6)}
JOB = "TANDEM_JOB"  # what a batch script for Slurm asks for (launcher/slurm.py), in its environment
MOST_GPUS = 64  # of one machine; each gets a process
CHECKOUT = Path(__file__).resolve().parents[2]


class Unusable(UserError):
    """A list of machines that cannot be read, or that names none."""


def load(inventory: Path) -> list[Host]:
    """Return the hosts of group `cluster` in inventory order, or those of the Slurm job that a
    script of ours runs in. Raises UserError."""
    # A job has the machines that Slurm assigned, whatever the inventory lists.
    list_job = engine.find_engine("slurm").machines if JOB in os.environ else None
    return list_job() if list_job else parse(read(inventory), inventory)


def hosts_of(options: Config) -> list[Host]:
    """Return the machines of the run. Raises UserError."""
    hosts = select(load(Path(options.inventory)), options)
    if options.min_nodes is not None and not 1 <= options.min_nodes <= len(hosts):
        raise UserError(
            f"MIN_NODES={options.min_nodes}: type a number from 1 to {len(hosts)}, the number "
            "of machines of the run."
        )
    return hosts


def select(hosts: list[Host], options: Config) -> list[Host]:
    """Return the first NODES hosts. Raises UserError."""
    if options.nodes is None:
        return hosts
    if options.nodes > len(hosts):
        raise UserError(
            f"NODES={options.nodes}, but {options.inventory} lists {len(hosts)} "
            f"({', '.join(host.name for host in hosts)}): add machines to [cluster] in that "
            f"file, or type NODES={len(hosts)} or less."
        )
    return hosts[: options.nodes]


def refuse(inventory: Path, limit: str | None = None) -> int:
    """Raise UserError for a list of machines that Ansible would accept and do nothing with: one
    that cannot be read, lacks a machine of `limit`, or hides an owner; and for machines whose ssh
    options skip its checks. `limit` is Ansible's --limit, of which plain names are checked: Ansible
    itself refuses a pattern that matches nothing. Returns the exit code 0."""
    document = read(inventory)
    names = members(document)
    groups = {group for group in document if group != "_meta"}
    valid = {*names, *groups, "all", "localhost"}
    words = [word.strip() for word in re.split("[,:]", limit or "")]
    unknown = [word for word in words if PLAIN.fullmatch(word) and word not in valid]
    if unknown:
        raise UserError(
            f"LIMIT={limit}: [{GROUP}] in {inventory} does not list {unknown[0]}. It lists "
            f"{', '.join(names)}."
        )
    for name in names:
        variables = variables_of(name, document, inventory)
        variables.owner()
        values = variables.values
        words = [str(values[key]) for key in values if key.startswith("ansible_")]
        has_templates = any("{{" in word for word in words)  # which Ansible alone can read
        if values.get("ansible_connection", "ssh") == "ssh" and not has_templates:
            variables.route()
    return 0


def read(inventory: Path) -> dict[str, Any]:
    """Return the document of `ansible-inventory --list`, which has machines in group `cluster`.
    Raises Unusable."""
    if not inventory.exists():
        raise Unusable(
            f"the inventory {inventory} does not exist: type INVENTORY=<file>, or write "
            "inventory.ini."
        )
    tool = Path(sys.executable).parent / "ansible-inventory"
    # The playbook folder is the checkout, so that group_vars/ is found for every inventory file.
    argv = [str(tool if tool.exists() else "ansible-inventory"), "-i", str(inventory), "--list"]
    env = {**os.environ, "ANSIBLE_INVENTORY_UNPARSED_FAILED": "True", "ANSIBLE_NOCOLOR": "1"}
    env["ANSIBLE_VARS_PLUGINS"] = os.devnull  # what ours refuses is refused below
    # Ansible would end with a locale not of UTF-8, or where it cannot write below HOME.
    env |= {"LC_ALL": "C.UTF-8", "ANSIBLE_LOCAL_TEMP": tempfile.gettempdir()}
    try:
        done = subprocess.run(
            [*argv, "--playbook-dir", str(CHECKOUT)],
            # Ansible refuses one that does not block, as an ssh beside it makes a terminal.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )
    except FileNotFoundError:
        raise UserError("ansible-inventory is not installed here: run `make env` first.") from None
    if done.returncode != 0:
        # Ansible prints several reasons, wrapped at the terminal's width: the first one is enough.
        text = " ".join(done.stderr.split())
        match = re.search(r"Failed to parse inventory: (.+?)(?= Failed| <<<| Origin:| \[|$)", text)
        match = match or re.search(r"(?:\[ERROR\]|ERROR!|\[WARNING\])[:!]? (.+?)(?= \[|$)", text)
        reason = match.group(1).strip() if match else text or "it gave no reason"
        reason = reason.removesuffix(".")
        raise Unusable(
            f"Ansible cannot read the inventory {inventory}: {reason}. Correct that file."
        )
    document = json.loads(done.stdout)
    names = members(document)
    if not names:
        raise Unusable(f"the inventory {inventory} {machines.NOBODY}")
    for fault in filter(None, map(machines.name_fault, names)):
        raise Unusable(f"the inventory {inventory} {fault}")
    return document


def parse(document: dict[str, Any], inventory: Path) -> list[Host]:
    """Turn the document of `ansible-inventory --list` into hosts. Raises UserError."""
    # All mistakes are reported at once: each correction may take a walk to another PC.
    problems: list[str] = []
    hosts = []
    for name in members(document):
        try:
            hosts.append(_host(variables_of(name, document, inventory)))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return hosts


def members(document: dict[str, Any], group: str = GROUP) -> list[str]:
    """Return the hosts of a group and its children, each once, in the inventory's order."""
    entry = document.get(group, {})
    # The order becomes that of the node ranks.
    names = list(entry.get("hosts", []))
    for child in entry.get("children", []):
        names += members(document, child)
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class Variables:
    """One machine's variables in the inventory, read as plain values."""

    name: str
    values: dict[str, Any]
    inventory: Path

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        # `ansible-inventory --list` prints templates as they are: only a play evaluates them.
        if isinstance(value, str) and "{{" in value:
            raise UserError(
                f"{self.name}: {key} in {self.inventory} is a template ({value}), but the "
                "launcher reads only plain values: write the value itself."
            )
        text = None if value is None else str(value)
        if text is not None and not text.isprintable():
            raise UserError(
                f"{self.name}: {key} in {self.inventory} has an unprintable character "
                f"({ascii(text)[:80]}): remove it."
            )
        return text

    def word(self, key: str, default: str) -> str:
        return self.text(key) or default

    def number(self, key: str, minimum: int, maximum: int) -> int | None:
        value = self.text(key)
        if value is None:
            return None
        if re.fullmatch("[0-9]{1,6}", value) and minimum <= int(value) <= maximum:
            return int(value)
        raise UserError(
            f"{self.name}: {key} in {self.inventory} is {value[:40]!r}, not a whole number from "
            f"{minimum} to {maximum}."
        )

    def connection(self) -> str:
        value = self.word("ansible_connection", "ssh")
        # Ansible knows docker, winrm and others, by which the launcher cannot start anything.
        if value not in engine.NAMES:
            raise UserError(
                f"{self.name}: ansible_connection={value} is not supported for training: use "
                f"{' or '.join(engine.NAMES)}."
            )
        return value

    def user(self) -> str | None:
        return self.text("train_user") or self.text("ansible_user")

    def route(self) -> Route:
        """Return the route of ssh, from the same variables that Ansible uses. Raises UserError."""
        if self.connection() != "ssh":
            return Route()
        # It would replace ssh_args of ansible.cfg.
        if self.text("ansible_ssh_args"):
            raise UserError(
                f"{self.name}: ansible_ssh_args in {self.inventory} would replace the options "
                "that check host keys strictly: use ansible_ssh_common_args, which adds "
                "options."
            )
        port, key = self.number("ansible_port", 1, 65535), self.text("ansible_ssh_private_key_file")
        flags = {"-p": port, "-i": key, "-l": self.user()}
        words = [word for flag, value in flags.items() if value for word in (flag, str(value))]
        for name in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
            words += shlex.split(self.word(name, ""))
        try:
            return route.find(self.word("ansible_host", self.name), words)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

    def environment(self) -> dict[str, str]:
        variables = self.values.get("run_env", {})
        if not isinstance(variables, dict):
            raise UserError(
                f"{self.name}: run_env in {self.inventory} must be a mapping of names to values, "
                f"not {variables!r}."
            )
        texts = {str(key): str(value) for key, value in variables.items()}
        for key, value in texts.items():
            if not re.fullmatch(r"[^=\W]\w*", key, re.ASCII) or "\0" in value:
                raise UserError(
                    f"{self.name}: run_env in {self.inventory} has {key!r}: a variable's name "
                    "has only letters, digits and _, and its value has no NUL."
                )
        return texts

    def copied(self) -> dict[str, str]:
        """Return this machine's folders of the data sets that it has copies of, as far as plain
        values name them."""
        names, folder = self.values.get("data_sets"), self.values.get("data_source")
        # Copies go over ssh; a machine that reads a share has none.
        if not isinstance(names, list) or self.connection() != "ssh" or self.is_shared():
            return {}
        try:
            names = [entry["name"] for entry in layout.read_data_sets(names)]
        except layout.LayoutError as error:
            raise UserError(f"{self.name}: in {self.inventory} {error}") from None
        return {name: f"{folder or CHECKOUT / 'data'}/{name}" for name in names}

    def is_shared(self) -> bool:
        """Return whether its data sets are, or may be, on a share."""
        return self.values.get("share_protocol", "local") != "local"

    def data_server(self) -> str:
        return str(self.values.get("share_host", "")) if self.is_shared() else ""

    def owner(self) -> owned.Owner:
        texts = {word: text for word in owned.WORDS if (text := self.text(word)) is not None}
        owner, problems = owned.read(texts, self.values)
        if problems:
            raise UserError(*(f"{self.name}: in {self.inventory} {text}" for text in problems))
        return owner


def variables_of(name: str, document: dict[str, Any], inventory: Path) -> Variables:
    """Return a machine's variables, with those of its groups."""
    values = document.get("_meta", {}).get("hostvars", {}).get(name, {})
    return Variables(name, values, inventory)


def _host(variables: Variables) -> Host:
    name, route_there = variables.name, variables.route()
    is_local = engine.find_engine(variables.connection()).is_local

    def path(key: str, default: str) -> str:
        # Not resolved: the environment's python is a symbolic link, and its location says which
        # environment it belongs to.
        value = variables.word(key, default)
        return os.path.normpath(CHECKOUT / value) if is_local else value

    node_dir = path("node_dir", "tandem")
    if node_dir == str(CHECKOUT / "tandem"):
        # group_vars means a folder in a home; in the checkout that is a package, which is sent.
        node_dir = str(CHECKOUT / ".tandem" / name)
    return Host(
        name=name,
        connection=variables.connection(),
        address=numeric(route_there.address or variables.word("ansible_host", "127.0.0.1"), name),
        port=route_there.port,
        user=variables.user(),
        env_python=path("env_python", "/opt/tandem/env/bin/python"),
        node_dir=node_dir,
        data_root=path("data_root", "/srv/tandem/data"),
        gpus=variables.number("gpus", 0, MOST_GPUS),
        interface=variables.text("interface"),
        cuda_home=variables.text("cuda_home") or None,
        env=variables.environment(),
        owner=variables.owner(),
        route=route_there,
        copied=variables.copied(),
        data_server=variables.data_server(),
    )


def numeric(address: str, name: str) -> str:
    """Return the address in digits. Raises UserError."""
    # A name may mean 127.0.1.1 on the machine that has it, so the other machines get no name.
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address))
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:  # UnicodeError: a label is empty, or too long
        raise UserError(
            f"{name}: there is no host {address[:80]!r} "
            f"({getattr(error, 'strerror', 0) or error}): correct ansible_host, or write its "
            "numeric address."
        ) from None
