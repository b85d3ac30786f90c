"""Reads the machines from Ansible's inventory, by `ansible-inventory --list`.

`load` is the entry for runs, and `check` the entry for `make provision` and other commands that
call Ansible. Tandem has no other list of machines. A Host is one machine of a run (engine.py).
"""

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

PLAIN_NAME = re.compile(r"\w[\w.-]*")  # no other pattern of Ansible, such as pc*, !pc3 or @file
# The sample machines in inventory.ini, which are also the machines of the lab.
EXAMPLE = {f"node{number}": f"192.168.56.{110 + number}" for number in range(1, 6)}
JOB = "TANDEM_JOB"  # this variable is set in a Slurm job of `make slurm` (launcher/slurm.py)
MOST_GPUS = 64  # of one machine; each gets a process
CHECKOUT = Path(__file__).resolve().parents[2]


class Unusable(UserError):
    """Says that the inventory cannot be read, has no machines, or has a wrong name."""


def load(inventory: Path) -> list[Host]:
    """Return the hosts of group `cluster` in inventory order. In a Slurm job of `make slurm`,
    return the machines of the job instead. Raises UserError."""
    list_job = engine.find_engine("slurm").machines if JOB in os.environ else None
    return list_job() if list_job else parse(read(inventory), inventory)


def hosts_of(options: Config) -> list[Host]:
    """Return the machines of a run with these options. Raises UserError."""
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


def check(inventory: Path, limit: str | None = None) -> int:
    """Check mistakes that Ansible would accept: an unreadable inventory, a name in `limit` that the
    inventory does not list, wrong settings of owners, and ssh options that skip checks of host
    keys. `limit` is Ansible's --limit. Returns the exit code 0. Raises UserError."""
    document = read(inventory)
    names = list_members(document)
    groups = {group for group in document if group != "_meta"}
    valid_names = {*names, *groups, "all", "localhost"}
    # Only plain names are checked: Ansible itself refuses a pattern that matches nothing.
    words = [word.strip() for word in re.split("[,:]", limit or "")]
    unlisted = [word for word in words if PLAIN_NAME.fullmatch(word) and word not in valid_names]
    if unlisted:
        raise UserError(
            f"LIMIT={limit}: [{GROUP}] in {inventory} does not list {unlisted[0]}. It lists "
            f"{', '.join(names)}."
        )
    for name in names:
        variables = get_variables(name, document, inventory)
        variables.owner()  # raises UserError
        values = variables.values
        # The route depends on these variables. If one is a template, only Ansible can evaluate it.
        texts = [str(values[key]) for key in values if key.startswith("ansible_")]
        has_templates = any("{{" in text for text in texts)
        if values.get("ansible_connection", "ssh") == "ssh" and not has_templates:
            variables.route()  # raises UserError
    return 0


def read(inventory: Path) -> dict[str, Any]:
    """Return the document that `ansible-inventory --list` prints: {"_meta": {"hostvars": {machine:
    variables}}, group: {"hosts": [...], "children": [...]}, ...}. Raises Unusable, also if group
    `cluster` has no machines."""
    if not inventory.exists():
        raise Unusable(
            f"the inventory {inventory} does not exist: type INVENTORY=<file>, or write "
            "inventory.ini."
        )
    tool = Path(sys.executable).parent / "ansible-inventory"
    # With the checkout as playbook folder, Ansible finds group_vars/ for any inventory file.
    argv = [str(tool if tool.exists() else "ansible-inventory"), "-i", str(inventory), "--list"]
    env = {**os.environ, "ANSIBLE_INVENTORY_UNPARSED_FAILED": "True", "ANSIBLE_NOCOLOR": "1"}
    env["ANSIBLE_VARS_PLUGINS"] = os.devnull  # Tandem's plugin names.py would repeat these checks
    # Ansible fails in a locale without UTF-8, and if it cannot write below HOME.
    env |= {"LC_ALL": "C.UTF-8", "ANSIBLE_LOCAL_TEMP": tempfile.gettempdir()}
    try:
        done = subprocess.run(
            [*argv, "--playbook-dir", str(CHECKOUT)],
            # Ansible refuses a stdin that does not block, and ssh makes terminals non-blocking.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )
    except FileNotFoundError:
        raise UserError("ansible-inventory is not installed here: run `make env` first.") from None
    if done.returncode != 0:
        # Ansible wraps long lines, and prints several reasons. The first reason is enough:
        # `[ERROR]: Failed to parse inventory: <reason> <<< caused by ...`.
        text = " ".join(done.stderr.split())
        match = re.search(r"Failed to parse inventory: (.+?)(?= Failed| <<<| Origin:| \[|$)", text)
        # Without this sentence, the first error or warning counts.
        match = match or re.search(r"(?:\[ERROR\]|ERROR!|\[WARNING\])[:!]? (.+?)(?= \[|$)", text)
        reason = match.group(1).strip() if match else text or "it gave no reason"
        raise Unusable(
            f"Ansible cannot read the inventory {inventory}: {reason.removesuffix('.')}. "
            "Correct that file."
        )
    document = json.loads(done.stdout)
    names = list_members(document)
    if not names:
        raise Unusable(f"the inventory {inventory} {machines.NOBODY}")
    for fault in filter(None, map(machines.name_fault, names)):
        raise Unusable(f"the inventory {inventory} {fault}")
    return document


def parse(document: dict[str, Any], inventory: Path) -> list[Host]:
    """Turn the document of `ansible-inventory --list` into hosts. Raises UserError."""
    # All mistakes are reported at once, so that the user can correct them together.
    problems: list[str] = []
    hosts = []
    for name in list_members(document):
        try:
            hosts.append(_make_host(get_variables(name, document, inventory)))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return hosts


def list_members(document: dict[str, Any], group: str = GROUP) -> list[str]:
    """Return the hosts of a group and its children, each once, in the inventory's order."""
    entry = document.get(group, {})
    names = list(entry.get("hosts", []))  # a machine's index in this list becomes its node rank
    for child in entry.get("children", []):
        names += list_members(document, child)
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class Variables:
    """Reads one machine's variables in the inventory. `values`: {variable: value}. The methods
    raise UserError for a value that is unsuitable, or that is a template."""

    name: str
    values: dict[str, Any]
    inventory: Path

    def text(self, key: str) -> str | None:
        """Return the value of a variable as one printable line; None if the variable is not set."""
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
        """Return the text of a variable, or the default if it is not set or empty."""
        return self.text(key) or default

    def number(self, key: str, minimum: int, maximum: int) -> int | None:
        """Return the whole number in a variable; None if it is not set."""
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
        """Return one of ENGINE_NAMES."""
        value = self.word("ansible_connection", "ssh")
        # Ansible also supports docker, winrm and more, for which the launcher has no engine.
        if value not in engine.ENGINE_NAMES:
            raise UserError(
                f"{self.name}: ansible_connection={value} is not supported for training: use "
                f"{' or '.join(engine.ENGINE_NAMES)}."
            )
        return value

    def user(self) -> str | None:
        """Return the run user, or None for the user who starts the run."""
        return self.text("train_user") or self.text("ansible_user")

    def route(self) -> Route:
        """Return the route of ssh, from the same variables that Ansible uses."""
        if self.connection() != "ssh":
            return Route()
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
            return route.find_route(self.word("ansible_host", self.name), words)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

    def environment(self) -> dict[str, str]:
        """Return the variables that run_env adds to the environment of the ranks."""
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
        """Return the control node's folder of each data set that `make provision` copies to this
        machine: {data set: folder}."""
        names, folder = self.values.get("data_sets"), self.values.get("data_source")
        # Data sets are copied only by ssh, and to no machine that reads a share. If `data_sets` is
        # a template, only Ansible knows the names.
        if not isinstance(names, list) or self.connection() != "ssh" or self.is_shared():
            return {}
        try:
            names = [entry["name"] for entry in layout.read_data_sets(names)]
        except layout.LayoutError as error:
            raise UserError(f"{self.name}: in {self.inventory} {error}") from None
        return {name: f"{folder or CHECKOUT / 'data'}/{name}" for name in names}

    def is_shared(self) -> bool:
        """Return whether the data sets of this machine are on a share. A template counts as yes."""
        return self.values.get("share_protocol", "local") != "local"

    def data_server(self) -> str:
        """Return the machine that shares data_root with this machine; "" without a share."""
        return str(self.values.get("share_host", "")) if self.is_shared() else ""

    def owner(self) -> owned.Owner:
        """Return the settings of the machine's owner."""
        texts = {word: text for word in owned.WORDS if (text := self.text(word)) is not None}
        owner, problems = owned.read_owner(texts, self.values)
        if problems:
            raise UserError(*(f"{self.name}: in {self.inventory} {text}" for text in problems))
        return owner


def get_variables(name: str, document: dict[str, Any], inventory: Path) -> Variables:
    """Return a machine's variables, with those of its groups."""
    values = document.get("_meta", {}).get("hostvars", {}).get(name, {})
    return Variables(name, values, inventory)


def _make_host(variables: Variables) -> Host:
    """Return the Host that a machine's variables describe. Raises UserError."""
    name, ssh_route = variables.name, variables.route()
    is_local = engine.find_engine(variables.connection()).is_local

    def path(key: str, default: str) -> str:
        # normpath does not follow links: the environment's python is a link, and Python finds its
        # environment by the place of the link.
        value = variables.word(key, default)
        return os.path.normpath(CHECKOUT / value) if is_local else value

    node_dir = path("node_dir", "tandem")
    if node_dir == str(CHECKOUT / "tandem"):
        # By `tandem`, group_vars means a folder in a home. In the checkout `tandem` is a package.
        node_dir = str(CHECKOUT / ".tandem" / name)
    return Host(
        name=name,
        connection=variables.connection(),
        # The route of a local machine is empty.
        address=to_numeric(ssh_route.address or variables.word("ansible_host", "127.0.0.1"), name),
        port=ssh_route.port,
        user=variables.user(),
        env_python=path("env_python", "/opt/tandem/env/bin/python"),
        node_dir=node_dir,
        data_root=path("data_root", "/srv/tandem/data"),
        gpus=variables.number("gpus", 0, MOST_GPUS),
        interface=variables.text("interface"),
        cuda_home=variables.text("cuda_home") or None,
        env=variables.environment(),
        owner=variables.owner(),
        route=ssh_route,
        copied=variables.copied(),
        data_server=variables.data_server(),
    )


def to_numeric(address: str, name: str) -> str:
    """Return the numeric address for an address or host name. Raises UserError."""
    # Plans have no host names: on the machine itself, the machine's name may mean 127.0.1.1.
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address))
    try:
        # An entry is (family, type, protocol, name, (address, port, ...)). The first one counts.
        _, _, _, _, end = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        return str(end[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: a label is empty, or too long
        raise UserError(
            f"{name}: there is no host {address[:80]!r} "
            f"({getattr(error, 'strerror', 0) or error}): correct ansible_host, or write its "
            "numeric address."
        ) from None
