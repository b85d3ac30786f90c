"""What apt would bring along, from what its simulation prints; who waits for its lock."""

import os
import re
import subprocess

import pytest
import yaml

from planning.packages import locked, packages_planned
from tests.unit.ansible.provision_machines import ROOT

# apt-get 2.6.1 of Debian 12, and a foreign architecture as Ubuntu's desktops have one.
SIMULATED = """\
Reading package lists...
The following NEW packages will be installed:
  chrony libedit2
The following packages will be upgraded:
  libc6
Inst libc6 [2.36-9+deb12u9] (2.36-9+deb12u10 Debian:12.10/stable [amd64]) []
Inst libedit2 (3.1-20221030-2 Debian:12.10/stable [amd64])
Inst libnvidia-compute-580:i386 (580.126.09-0ubuntu0.22.04.1 Ubuntu:22.04 [i386])
Inst chrony (4.3-2+deb12u1 Debian:12.10/stable [amd64])
Remv systemd-timesyncd [252.36-1~deb12u1]
Conf libc6 (2.36-9+deb12u10 Debian:12.10/stable [amd64])
Conf chrony (4.3-2+deb12u1 Debian:12.10/stable [amd64])
"""


def test_new_packages_are_planned_and_upgraded_ones_are_not():
    assert packages_planned(SIMULATED) == ["chrony", "libedit2", "libnvidia-compute-580"]
    assert packages_planned("E: Unable to locate package nvidia-driver-999\n") == []


REFUSALS = {
    "apt-get 1.6 (Ubuntu 18.04)": {
        "msg": "'/usr/bin/apt-get -y install 'chrony'' failed: E: Could not get lock "
        "/var/lib/dpkg/lock-frontend - open (11: Resource temporarily unavailable)\nE: Unable to "
        "acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?"
    },
    "apt-get 2.6": {
        "stderr": "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (apt)"
    },
    "python-apt": {"msg": "Failed to lock apt for exclusive operation: Failed to lock directory "
                   "/var/lib/apt/lists/: E:Could not get lock /var/lib/apt/lists/lock"},
    "dpkg 1.19": {"stderr": "dpkg: error: dpkg status database is locked by another process"},
    "dpkg 1.21": {
        "stderr": "dpkg: error: dpkg frontend lock was locked by another process with pid 7\n"
        "Note: removing the lock file is always wrong"
    },
}  # fmt: skip


@pytest.mark.parametrize("who", REFUSALS)
def test_a_lock_is_told_from_other_failures(who):
    assert locked({"failed": True, **REFUSALS[who]})


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"msg": None, "changed": True},
        {"msg": "E: Unable to locate package nvidia-driver-999", "failed": True},
        {"stderr": "dpkg: error processing package tzdata: You don't have enough free space"},
    ],
)
def test_what_is_no_lock_is_not_waited_for(result):
    assert not locked(result)


CHANGES = re.compile(r"ansible\.builtin\.(apt|dpkg_selections)$")
BY_COMMAND = re.compile(
    r"'apt',|dpkg --configure|'dpkg', '--purge'|apt-get (?!.*simulate)[^']*(install|update)"
)


def tasks_of(rows):
    """Tasks of a file or of its plays, those in blocks too."""
    for row in rows or []:
        for part in ("block", "rescue", "always", "pre_tasks", "tasks", "post_tasks"):
            yield from tasks_of(row.get(part))
        yield row


def test_each_task_that_changes_packages_waits_for_those_that_others_install():
    seen = set()
    roles = (ROOT / "ansible/roles").rglob("tasks/*.yml")
    for path in [*roles, *(ROOT / "ansible/playbooks").rglob("*.yml")]:
        for task in tasks_of(yaml.safe_load(path.read_text())):
            words = str([task.get(f"ansible.builtin.{name}", "") for name in ("command", "raw")])
            if any(CHANGES.match(name) for name in task) or BY_COMMAND.search(words):
                seen.add(path.parent.parent.name if path.parent.name == "tasks" else path.stem)
                name = task["register"]
                waits = f"not ({name} | tandem_locked)"
                raw = f"{name}.rc == 0 or not (said | tandem_locked)"
                assert task["until"] in (waits, raw), (path, task["name"])
                assert (task["retries"], task["delay"]) == (60, 10)
                # Otherwise it would wait twice, in two ways.
                assert task.get("ansible.builtin.apt", {}).get("lock_timeout", 0) == 0
    assert seen == {"packages", "driver", "clock", "offline", "bootstrap"}


DPKG = """#!/bin/sh
echo >> tries
[ $(wc -l < tries) -gt 2 ] || { echo 'dpkg: error: dpkg is locked by another process' >&2; exit 2; }
"""
# Only `update` meets the lock of apt's lists, which DPkg::Lock::Timeout does not wait for; over ssh
# the words come in stdout. On a machine without any lists nothing can be installed before.
APT_GET = """#!/bin/sh
case $1 in
update) echo >> tries; [ $(wc -l < tries) -gt 2 ] && { touch lists; exit 0; }
    echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt)" >&%s
    exit 100 ;;
*) test -e lists || { echo 'E: Unable to locate package python3'; exit 100; } ;;
esac
"""


def played(folder, tasks, program, text):
    """Plays tasks on this machine with a stand-in for a program; returns Ansible's end."""
    (folder / program).write_text(text)
    (folder / program).chmod(0o755)
    play = {"name": "Play", "hosts": "localhost", "gather_facts": False, "tasks": tasks,
            "vars": {"packages_unwanted": ["cowsay"]},
            "environment": {"PATH": f"{folder}:{os.environ['PATH']}"}}  # fmt: skip
    (folder / "book.yml").write_text(yaml.safe_dump([play]))
    # `raw` knows no environment but that of Ansible's own.
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                   "PATH": f"{folder}:{os.environ['PATH']}"}  # fmt: skip
    argv = ["ansible-playbook", "--connection", "local", "--inventory", "localhost,", "book.yml"]
    return subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=folder)


def test_a_locked_dpkg_is_asked_again_until_it_is_free(tmp_path):
    text = (ROOT / "ansible/roles/packages/tasks/purge.yml").read_text()
    (tmp_path / "purge.yml").write_text(
        text.replace("become: true", "become: false").replace("delay: 10", "delay: 0")
    )
    done = played(tmp_path, [{"ansible.builtin.import_tasks": "purge.yml"}], "dpkg", DPKG)
    assert done.returncode == 0 and "attempts" not in done.stderr, done.stdout
    assert (tmp_path / "tries").read_text() == "\n" * 3


@pytest.mark.parametrize("stream", [1, 2])
def test_bootstrap_waits_for_the_lock_of_apts_lists(tmp_path, stream):
    text = (ROOT / "ansible/playbooks/bootstrap.yml").read_text()
    play = yaml.safe_load(text.replace("/usr/bin/python3", "/nowhere"))[0]
    (task,) = play["pre_tasks"]
    done = played(tmp_path, [{**task, "delay": 0}], "apt-get", APT_GET % stream)
    assert done.returncode == 0 and "changed=1" in done.stdout, done.stdout
    assert (tmp_path / "tries").read_text() == "\n" * 3


def test_bootstrap_does_not_wait_for_what_is_no_lock(tmp_path):
    text = (ROOT / "ansible/playbooks/bootstrap.yml").read_text().replace("/usr/bin/python3", "/no")
    refuses = "#!/bin/sh\necho >> tries; echo 'E: Unable to locate package python3'; exit 100\n"
    done = played(tmp_path, yaml.safe_load(text)[0]["pre_tasks"], "apt-get", refuses)
    assert done.returncode == 2 and "Unable to locate" in done.stdout
    assert (tmp_path / "tries").read_text() == "\n" * 2  # update, and install


def test_the_stick_waits_for_the_lock_of_dpkg_and_has_package_lists_of_its_own():
    settings = (ROOT / "ansible/playbooks/templates/install.sh.j2").read_text().partition("<<EOF")
    assert 'DPkg::Lock::Timeout "600";' in settings[2].partition("EOF")[0]
    assert 'Dir::State::lists "$work/lists";' in settings[2].partition("EOF")[0]
