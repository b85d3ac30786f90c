"""What role reach makes of machines by what a shell says there, before any module runs."""

import json
import platform
import shlex
import subprocess

import pytest
import yaml

from planning import looks
from tests.unit.ansible.provision_machines import (
    ROOT,
    ansible_playbook,
    by_the_newer,
    load,
    stand_in,
)

SAID = (
    "Welcome to Ubuntu!\r\narch={arch}\r\nkernel={kernel}\r\nsudo_ws={sudo_ws}\r\n"
    "container={container}\r\n"
    'python={python}\r\nVERSION_ID="{release}"\r\nID={distribution}\r\nID_LIKE="{like}"\r\n'
)
NOBLE = {
    **dict.fromkeys(("container", "like", "sudo_ws"), ""),
    **{"arch": "x86_64", "kernel": "6.8.0-60-generic", "python": "3.12.3"},
    **{"distribution": "ubuntu", "release": "24.04"},
}
BIONIC = {**NOBLE, "release": "18.04", "python": "3.6.9"}
TRIXIE = {**NOBLE, "distribution": "debian", "release": "13", "python": "3.13.5"}
PLAYS = """
- hosts: cluster
  gather_facts: false
  roles: [reach]
- hosts: reachable
  gather_facts: false
  tasks: [{ansible.builtin.debug: {msg: "{{ inventory_hostname }} goes on by {{ by }}"}}]
  vars: {by: "{{ ansible_become_exe | default('sudo') }}"}
"""
VARIABLES = {"require_all": False, "reach_look": "cat {{ playbook_dir }}/{{ inventory_hostname }}"}


def reach(folder, machines, **environment):
    """Its exit code, and what Ansible prints."""
    for name, facts in machines.items():
        (folder / name).write_text(SAID.format(**facts))
    words = ("--extra-vars", json.dumps(VARIABLES))
    environment["ANSIBLE_ROLES_PATH"] = str(ROOT / "ansible/roles")
    hosts = {name: facts.get("settings", {}) for name, facts in machines.items()}
    done = ansible_playbook(folder, PLAYS, *words, inventory=hosts, **environment)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("third", "remedy"),
    [
        ([], "`make provision CORE=2.16` provisions all machines that answer"),
        ([TRIXIE], "`make provision CORE=2.16 LIMIT=pc2`, then `make provision"),
    ],
    ids=["that 2.16 takes", "with a newer Python"],
)
def test_of_mixed_machines_those_with_an_old_python_are_told_what_to_do(third, remedy):
    seen = [looks.look(SAID.format(**facts)) for facts in (NOBLE, BIONIC, *third)]
    named = [{**facts, "host": f"pc{number}"} for number, facts in enumerate(seen, 1)]
    (finding,) = looks.unfit(named, "2.19.5")
    assert finding["host"] == "pc2" and remedy in finding["remedy"]


def test_what_nothing_can_provision_is_refused_alone(tmp_path):
    pc3 = {**NOBLE, "release": "26.04", "python": "3.14.3", "sudo_ws": "/usr/bin/sudo.ws"}
    spark = {**NOBLE, "arch": "aarch64"}
    kept = {**spark, "settings": {"driver_policy": "keep"}}
    machines = {"pc1": spark, "pc2": NOBLE, "pc3": pc3, "pc4": kept}
    code, said = reach(tmp_path, machines)
    assert code == 2 and "pc2 goes on by sudo\n" in said
    assert "pc3 goes on by sudo.ws" in said  # beside sudo-rs, whose question Ansible does not know
    assert said.count("Checking that the machines answer") == 1
    assert "pc1: its processor is aarch64, for which Tandem installs no driver. Remedy" in said
    assert "pc1 goes on" not in said and "pc4 goes on" in said


@by_the_newer
def test_where_all_have_an_old_python_the_older_ansible_is_chosen(tmp_path):
    screen = {"ANSIBLE_STDOUT_CALLBACK": "default", "ANSIBLE_SHOW_CUSTOM_STATS": "1"}
    code, said = reach(tmp_path, {"pc1": BIONIC, "pc2": BIONIC}, **screen)
    assert code == 2 and "goes on" not in said
    assert f"tandem_core: '{looks.OLDER_CORE}'" in said


@pytest.mark.parametrize("made", [0, 1])
def test_the_run_begins_anew_by_the_ansible_that_was_chosen(monkeypatch, made):
    """In place of this one; where it cannot be installed, this one ends."""
    screen, begun = load("ansible/callback_plugins/tandem.py"), []
    tool = lambda argv: subprocess.CompletedProcess(argv, made)  # noqa: E731
    monkeypatch.setattr(screen.subprocess, "run", tool)
    monkeypatch.setattr(screen.os, "execve", lambda *argv: begun.append(argv))
    monkeypatch.setattr(screen.sys, "argv", ["/x/.venv/bin/ansible-playbook", "site.yml", "-K"])
    screen.continue_with_core("2.16")
    program = str(ROOT / ".venv-core2.16/bin/ansible-playbook")
    assert [argv[1] for argv in begun] == [[program, "site.yml", "-K"]] * (1 - made)


def test_a_shell_says_what_its_machine_is(tmp_path):
    role = yaml.safe_load((ROOT / "ansible/roles/reach/vars/main.yml").read_text())
    python = "{{ reach_python if '/' in reach_python else '/usr/bin/python3' }}"
    script = role["reach_look"].replace(python, shlex.quote(str(tmp_path / "python3")))
    programs = {"python3": "echo 3.6.9", "systemd-detect-virt": "echo lxc; exit 1"}
    path = stand_in(tmp_path, **programs)
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env={"PATH": path})
    assert done.returncode == 0 and "{{" not in script
    seen = looks.look(done.stdout)
    assert (seen["python"], seen["container"]) == ("3.6.9", "lxc")
    release = platform.freedesktop_os_release()
    assert (seen["arch"], seen["distribution"]) == (platform.machine(), release["ID"])


def test_what_a_shell_does_not_say_is_left_to_the_modules():
    answers = {"pc1": {"stdout": "sh: uname: not found\n"}, "pc2": {"unreachable": True}}
    machines = [{"inventory_hostname": n, "reach_answer": answers[n]} for n in answers]
    assert looks.looks(machines) == []
