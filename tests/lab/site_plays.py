"""Running roles of site.yml on machines of the lab, as somebody at the control node would."""

import fcntl
import json
import re
import subprocess
import sys
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
RECAP = re.compile(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.M)


def write_play(folder: Path, roles: list[str], hosts: str = "cluster", become: bool = False) -> str:
    """A playbook of `roles`, and its path."""
    play = folder / "play.yml"
    play.write_text(
        f"- name: Roles under test\n  hosts: {hosts}\n  become: {str(become).lower()}\n"
        f"  roles: [{', '.join(roles)}]\n"
    )
    return str(play)


def write_inventory(folder: Path, hosts: dict[str, str]) -> str:
    """An inventory of {name: variables}, and its path."""
    inventory = folder / "inventory.ini"
    lines = [f"{name} {variables}" for name, variables in hosts.items()]
    inventory.write_text(
        "\n".join(["[cluster]", *lines, "[cluster:vars]", "ansible_user=tandem", ""])
    )
    return str(inventory)


def gather_bundle(stack: str, python: str = "") -> None:
    """What site.yml will install, fetched on the host, since the lab has no way out; `python`: the
    machines' own, where the stack prefers another. One test process gathers at a time."""
    tool = Path(sys.executable).with_name("ansible-playbook")
    book = CHECKOUT / "ansible/playbooks/bundle.yml"
    wanted = json.dumps({"stack": stack, "bundle_python": python})
    with book.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([tool, book, "-e", wanted], cwd=CHECKOUT, check=True)


def draw_digits() -> None:
    """data/digits of this checkout, which role data copies."""
    if not (CHECKOUT / "data/digits").is_dir():
        argv = [sys.executable, "examples/digits.py", "data/digits"]
        subprocess.run(argv, cwd=CHECKOUT, check=True)


def play(lab, *words: str, check: bool = True) -> subprocess.CompletedProcess:
    """Runs ansible-playbook on the control node, and shows its output if it fails."""
    done = lab.control("ansible-playbook", *words, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def said(done: subprocess.CompletedProcess) -> str:
    """A play's output on one line, so that sentences can be found in it."""
    return " ".join(done.stdout.split())


def complaint(
    lab, folder: Path, role: str, *words: str, hosts: str = "cluster", gather: bool = False
) -> str:
    """What a role's own verification says is wrong with `hosts`, or "" when it is content."""
    book = folder / "verify.yml"
    book.write_text(
        f"- name: Verification under test\n  hosts: {hosts}\n"
        f"  gather_facts: {str(gather).lower()}\n  tasks:\n"
        "    - name: Look\n      ansible.builtin.include_role:\n"
        f"        name: {role}\n        tasks_from: verify\n"
    )
    done = play(lab, str(book), *words, check=False)
    return said(done) if done.returncode else ""


def changes(done: subprocess.CompletedProcess) -> dict[str, int]:
    """How much a play changed, by machine."""
    return {host: int(changed) for host, changed, _, _ in RECAP.findall(done.stdout)}


def changed_tasks(done: subprocess.CompletedProcess) -> dict[str, list[str]]:
    """Of the tasks that changed something, the machines on which they did."""
    found: dict[str, list[str]] = {}
    task = ""
    for line in done.stdout.splitlines():
        if line.startswith(("TASK [", "RUNNING HANDLER [")):
            task = line.partition("[")[2].rpartition("]")[0]
        elif line.startswith("changed: ["):
            found.setdefault(task, []).append(line[len("changed: [") :].partition("]")[0])
    return found


def failures(done: subprocess.CompletedProcess) -> set[str]:
    """The machines on which a play failed or that it did not reach."""
    return {host for host, _, gone, failed in RECAP.findall(done.stdout) if int(gone) + int(failed)}


def reboot(lab, node: int, address: str | None = None) -> None:
    """Reboot a machine from inside and return when it greets again (within 60 s)."""
    target = f"tandem@{address or f'192.168.56.{110 + node}'}"
    boot_id = ["ssh", "-o", "ConnectTimeout=2", target, "cat /proc/1/stat"]
    before = lab.control(*boot_id).stdout.split()[21]
    lab.control("ssh", target, "sudo systemctl reboot", check=False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = lab.control(*boot_id, check=False)
        if answer.returncode == 0 and answer.stdout.split()[21] != before:
            return
        time.sleep(0.2)
    raise AssertionError(f"node{node} did not come back from its reboot")
