"""Give this control node access to machines that accept only a password: `make bootstrap`.

For each machine this program shows the host key. A person compares the key with the one on the
machine's own screen, and ssh trusts the key from then on. Then playbooks/bootstrap.yml installs
this control node's key for the user that provisions and for the user that trains, and writes the
sudo rules. This program itself changes only ~/.ssh of the control node.
"""

import argparse
import configparser
import getpass
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launcher/ is

from contract import interrupts, verbs
from contract.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PLAYBOOK = ROOT / "ansible" / "playbooks" / "bootstrap.yml"
PROGRAM_FOLDER = Path(sys.executable).parent  # Ansible's programs are in the same environment
SSH_FOLDER = Path("~/.ssh").expanduser()
# The two lines that start with blanks are commands, which print_wrapped_error does not wrap.
NO_ANSWER = """{name}: nothing answers at {address}, port {port}. On that machine's own screen:
    sudo apt install openssh-server
    ip -brief address          (is {address} among them? else correct inventory.ini)"""


@dataclass(frozen=True)
class Machine:
    name: str  # in the inventory
    address: str  # or a host name
    port: int  # of sshd
    provisioning_user: str  # the user that Ansible logs in as: ansible_user
    training_user: str  # the user that training processes run as: train_user, else ansible_user

    def ssh_name(self):
        """Name the machine as known_hosts does."""
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"


@dataclass(frozen=True)
class HostKey:
    line: str  # as in known_hosts: "192.168.1.20 ssh-ed25519 AAAAC3Nz..."
    fingerprint: str  # "SHA256:..."


def list_machines(inventory, limit):
    """List the selected machines, in the inventory's order. Raises UserError.

    inventory: its path, or None for inventory.ini; limit: a pattern for Ansible's --limit.
    """
    words = ["--limit", limit, *(["--inventory", inventory] if inventory else [])]
    words += ["--playbook-dir", str(ROOT)]  # for group_vars/, wherever the inventory is
    listing = json.loads(_run_inventory_tool("ansible-inventory", "--list", *words))
    variables = listing["_meta"]["hostvars"]
    # Only Ansible itself knows all members: from lines, child groups and patterns. It prints a
    # title and then a name per line: "  hosts (2):", "    pc1", "    pc2".
    try:
        text = _run_inventory_tool("ansible", "cluster", "--list-hosts", *words)
        _, *names = map(str.strip, text.splitlines())
    except UserError:  # --limit left no machine: ansible-inventory could read the inventory above
        names = []
    if not names:
        raise UserError(
            f"--limit {limit} selects no machine of the group `cluster` in the inventory"
        )
    return [make_machine(name, variables.get(name, {})) for name in names]


def make_machine(name, variables):
    """Make the Machine with these variables in the inventory. Raises UserError."""
    # In an inventory of YAML, a value may have any type.
    provisioning_user = read_user(variables, "ansible_user") or getpass.getuser()
    address, port = variables.get("ansible_host", name), variables.get("ansible_port", 22)
    if not isinstance(address, str):
        raise UserError(f"{name}: ansible_host in the inventory is {address!r}, which is not text")
    if not re.fullmatch("[0-9]{1,5}", str(port)):
        raise UserError(f"{name}: ansible_port in the inventory is {port!r}, which is not a port")
    return Machine(
        name=name,
        address=address,
        port=int(port),
        provisioning_user=provisioning_user,
        training_user=read_user(variables, "train_user") or provisioning_user,
    )


def read_user(variables, name):
    """Read the name of a user in a machine's variables; None if there is none. Raises UserError."""
    value = variables.get(name)
    # Names as useradd(8) accepts them; a $ at the end is Samba's.
    if value and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*[$]?", str(value)[:100]):
        raise UserError(
            f"{name} in the inventory is {value!r}, which is not a user's name: write the name "
            "itself, without a template"
        )
    return value


def _run_inventory_tool(tool, *words):
    """Run one of Ansible's programs on the inventory, and return its output. Raises UserError."""
    argv = [str(PROGRAM_FOLDER / tool), *words]
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1"}  # UserErrors quote Ansible's errors
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    process = subprocess.run(argv, cwd=ROOT, env=environment, **streams)
    if process.returncode:
        reason = re.sub(r"^(\[ERROR\]:|ERROR!) ", "", process.stderr.strip())
        # An error of vars_plugins/names.py is a whole sentence, which needs no introduction.
        is_complete = reason.startswith("the inventory ")
        raise UserError(reason if is_complete else f"the inventory cannot be read: {reason}")
    return process.stdout


def scan_host_key(machine):
    """Ask for the HostKey at the machine's address; None if nothing answers."""
    # Every sshd since 2014 has an ed25519 key, and people need to compare only one kind of key.
    argv = ["ssh-keyscan", "-T", "10", "-t", "ed25519", "-p", str(machine.port), machine.address]
    line = subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    if not line:
        return None
    printed = subprocess.run(
        ["ssh-keygen", "-lf", "-"], input=line, capture_output=True, text=True, check=True
    ).stdout
    # ssh-keygen prints "256 SHA256:47DEQpj8... 192.168.1.20 (ED25519)".
    return HostKey(line, fingerprint=printed.split()[1])


def read_known_keys(machine):
    """List the machine's keys in known_hosts: [[kind, key]]."""
    argv = ["ssh-keygen", "-F", machine.ssh_name()]
    lines = subprocess.run(argv, capture_output=True, text=True).stdout.splitlines()
    # A comment comes before each key: "# Host 192.168.1.20 found: line 3". The name may be hashed:
    # "|1|JfKT...= ssh-ed25519 AAAAC3Nz... comment".
    return [line.split()[1:3] for line in lines if not line.startswith("#")]


def trust_host_key(machine, key, expected, ask=input):
    """Add the machine's host key to known_hosts after its confirmation. Raises UserError.

    key: the result of `scan_host_key`. expected: {machine's name: fingerprint}; None: a person is
    asked. ask: prints a question and returns the answer, as input() does.
    """
    if key is None:
        try:
            socket.getaddrinfo(machine.address, machine.port)
        except (OSError, UnicodeError):  # UnicodeError: a label of the name is empty, or too long
            raise UserError(
                f"{machine.name}: the control node does not know the host name "
                f"{machine.address!r}. Correct it in the inventory, or write the address: "
                "ansible_host=192.168.1.20"
            ) from None
        raise UserError(NO_ANSWER.format(**vars(machine)))
    known_keys = read_known_keys(machine)
    key_kind, key_text = key.line.split()[1:3]
    if [key_kind, key_text] in known_keys:
        return
    # If known_hosts has another key of the same kind, nobody is asked, since people answer
    # questions with yes.
    if any(kind == key_kind for kind, _ in known_keys):
        raise UserError(
            f"{machine.name}: its host key is {key.fingerprint}, but known_hosts has another "
            f"key. If the machine was reinstalled, run ssh-keygen -R '{machine.ssh_name()}' "
            "and this command again. Otherwise somebody may intercept the connection: find "
            "out before you continue"
        )
    if not is_confirmed(machine, key, expected, ask):
        raise UserError(
            f"{machine.name}: the keys differ; nothing was trusted and no password was sent"
        )
    SSH_FOLDER.mkdir(mode=0o700, exist_ok=True)
    with (SSH_FOLDER / "known_hosts").open("ab+") as file:
        # The last line may lack its newline, and would then swallow the key.
        file_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, file_bytes - 1))
        separator = b"" if file.read() in (b"", b"\n") else b"\n"
        file.write(separator + key.line.encode() + b"\n")


def is_confirmed(machine, key, expected, ask):
    """Return true if `expected`, or else a person, confirms the key.

    Raises UserError without a terminal.
    """
    if expected is not None:
        return expected.get(machine.name) == key.fingerprint
    print(f"\n{machine.name}, {machine.address}")
    # Each line fits into 80 columns, since a fingerprint in two lines is hard to compare.
    print(f"  Its host key:   {key.fingerprint}")
    print("  On its screen:  ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
    try:
        return ask("  Are the two the same? [yes/no] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise UserError(
            f"{machine.name}: a person must confirm its host key, but this command has no "
            "terminal: run it in a terminal, or use --fingerprints"
        ) from None


def read_or_make_control_key():
    """Read this control node's public key. Make a pair of keys if the control node has none."""
    for kind in ("ed25519", "ecdsa", "rsa"):  # ssh tries keys of these names by itself
        public = SSH_FOLDER / f"id_{kind}.pub"
        if public.is_file():
            return public.read_text().strip()
    SSH_FOLDER.mkdir(mode=0o700, exist_ok=True)
    private = SSH_FOLDER / "id_ed25519"
    print(f"This control node has no key yet: creating {private}")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(private)], check=True)
    return private.with_suffix(".pub").read_text().strip()


def needs_no_password(machine, login):
    """Return true if this user can log in and become root already, by key and sudo rule."""
    # ansible.cfg's options for ssh override ~/.ssh/config. The test uses them too, since Ansible
    # has to log in with them. A path in them is relative to ROOT: "-F ansible/ssh_config".
    config = configparser.ConfigParser()
    config.read(ROOT / "ansible.cfg")
    words = shlex.split(config["ssh_connection"]["ssh_args"])
    options = [str(ROOT / word) if word.startswith("ansible/") else word for word in words]
    # -S none: with an open connection of ssh, the test would prove nothing about the key.
    argv = ["ssh", "-S", "none", *options, "-o", "BatchMode=yes"]
    argv += ["-p", str(machine.port), "-l", login, machine.address, "sudo -n true"]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def ask_for_logins(selected, login, ask):
    """Return {machine's name: (user, password)}; the password is "" if key and sudo rule suffice.

    selected: Machines; login: the user that --login names. ask: prints a prompt and returns what a
    person typed; called only for a machine that needs the password of `login`. Raises UserError.
    """
    users, previous_name = {}, None  # previous_name: the last machine that needed a password
    for machine in selected:
        print(f"{machine.name}: trying to log in without a password", flush=True)
        # The provisioning user comes first: an earlier call may have removed the sudo rule of
        # `login`.
        users_in_order = (machine.provisioning_user, login)
        passwordless = [user for user in users_in_order if needs_no_password(machine, user)]
        if passwordless:
            users[machine.name] = (passwordless[0], "")
            continue
        # In many labs all machines have the same password, but not in all.
        hint = f" (Enter: the same as on {previous_name})" if previous_name else ""
        try:
            typed = ask(f"Password of {login} on {machine.name}{hint}: ")
        except EOFError:
            raise UserError(
                f"{machine.name} asks for {login}'s password, but this command has no "
                "terminal: run it in a terminal, or use --password-file"
            ) from None
        previous_password = users[previous_name][1] if previous_name else ""
        users[machine.name] = (login, typed or previous_password)
        previous_name = machine.name
    return users


def read_fingerprints(file):
    """Read {machine's name: fingerprint} from a file; None if `file` is None. Raises UserError."""
    if not file:
        return None
    lines = read_option_file("--fingerprints", file).splitlines()
    rows = [line.split() for line in lines if line.strip()]
    for row in rows:
        if len(row) < 2 or not row[1].startswith("SHA256:"):
            raise UserError(
                f"--fingerprints {file}: {' '.join(row)!r} is not a machine's name and its "
                "fingerprint, such as `pc1 SHA256:...`"
            )
    return {name: fingerprint for name, fingerprint, *_ in rows}


def read_option_file(option, file):
    """Read the file that an option names. Raises UserError."""
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {file}: {error}") from None


def run_playbook(selected, users, args):
    """Run playbooks/bootstrap.yml, and return its exit code.

    selected: Machines; users: the result of ask_for_logins; args: the command line's options.
    """
    extra = {
        "access_users": {
            machine.name: {
                "login": users[machine.name][0],
                "provisions": machine.provisioning_user,
                "trains": machine.training_user,
            }
            for machine in selected
        },
        "access_key": read_or_make_control_key(),
        "access_sudo": "keep" if args.keep_sudo else "nopasswd",
    }
    argv = [str(PROGRAM_FOLDER / "ansible-playbook"), str(PLAYBOOK)]
    argv += ["--limit", ",".join(machine.name for machine in selected)]
    argv += ["--inventory", args.inventory] if args.inventory else []
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    # The passwords are in a file in memory, which has no name in any folder. So the passwords reach
    # neither a disk nor a command line, and disappear with this process.
    with os.fdopen(os.memfd_create("tandem"), "w") as secrets:
        json.dump({name: password for name, (_, password) in users.items()}, secrets)
        secrets.flush()
        path = f"/proc/{os.getpid()}/fd/{secrets.fileno()}"
        argv += ["--extra-vars", json.dumps({**extra, "access_secrets": path})]
        return subprocess.run(argv, cwd=ROOT, env=environment).returncode


def trust_host_keys(selected, expected):
    """Return (machines whose host key is trusted now, sentences about the refused machines)."""
    print(
        "Reading the host keys of all machines. If a machine is off, this takes 10 s.", flush=True
    )
    # The program scans all machines first, so that a person does not wait between the questions.
    with ThreadPoolExecutor(len(selected)) as pool:
        keys = list(pool.map(scan_host_key, selected))
    trusted, sentences = [], []
    for machine, key in zip(selected, keys, strict=True):
        try:
            trust_host_key(machine, key, expected)
            trusted.append(machine)
        except UserError as error:
            sentences.append(str(error))
    return trusted, sentences


def print_wrapped_error(text):
    """Print on stderr, wrapped for a terminal. Indented lines are commands, and are not wrapped."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    for line in text.splitlines():
        verbatim = line.startswith(" ") or width is None
        print(line if verbatim else verbs.wrap_lines(line, width), file=sys.stderr)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Let this control node into new machines.")
    parser.add_argument("--inventory", help="default: inventory.ini")
    parser.add_argument("--limit", default="all", help="machines, as for Ansible's --limit")
    parser.add_argument(
        "--login", default=getpass.getuser(), help="a user of the machines who may use sudo"
    )
    parser.add_argument(
        "--fingerprints",
        help="a file with lines `name SHA256:...`, instead of questions on the terminal",
    )
    parser.add_argument(
        "--keep-sudo",
        action="store_true",
        help="write no sudo rule; provisioning then needs ASK_SUDO=1 (-K) and a password",
    )
    parser.add_argument(
        "--password-file",
        help="a file with one password for all machines, instead of questions on the terminal",
    )
    args = parser.parse_args(argv)
    try:
        selected = list_machines(args.inventory, args.limit)
        expected, ask = read_fingerprints(args.fingerprints), getpass.getpass
        if args.password_file:
            # The prompt would name the machine, but the file has one password for all machines.
            password = read_option_file("--password-file", args.password_file).rstrip("\n")
            ask = lambda _: password  # noqa: E731
        trusted, sentences = trust_host_keys(selected, expected)
        users = ask_for_logins(trusted, args.login, ask)
    except UserError as error:
        print_wrapped_error(f"tandem: {error}")
        return 2
    code = run_playbook(trusted, users, args) if trusted else 0
    # Ansible's output is long, so the messages about refused machines come last.
    for sentence in sentences:
        print_wrapped_error(f"NOT LET IN: {sentence}")
    # A refused machine makes the call a failure, even if the playbook succeeded on the others.
    return code or (1 if sentences else 0)


if __name__ == "__main__":
    sys.exit(interrupts.run_main(main))
