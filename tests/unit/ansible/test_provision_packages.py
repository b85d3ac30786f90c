"""What apt would bring along, from what its simulation prints; who waits for its lock."""

import re

import pytest
import yaml

from planning.packages import locked, packages_planned
from tests.unit.ansible.provision_machines import ROOT, parsed, played, stand_in, tasks_of

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
    "dpkg 1.19": {"stderr": "dpkg: error: dpkg status database is locked by another process"},
    "dpkg 1.21": {
        "stderr": "dpkg: error: dpkg frontend lock was locked by another process with pid 7\n"
        "Note: removing the lock file is always wrong"
    },
}  # fmt: skip


@pytest.mark.parametrize("who", REFUSALS)
def test_a_lock_is_told_from_other_failures(who):
    assert locked({"failed": True, **REFUSALS[who]})


NO_SPACE = "dpkg: error processing package tzdata: You don't have enough free space"
UNKNOWN = "E: Unable to locate package nvidia-driver-999"


@pytest.mark.parametrize(
    "result",
    [{}, {"msg": None, "changed": True}, {"msg": UNKNOWN, "failed": True}, {"stderr": NO_SPACE}],
)
def test_what_is_no_lock_is_not_waited_for(result):
    assert not locked(result)


CHANGES = re.compile(r"ansible\.builtin\.(apt|dpkg_selections)$")
BY_COMMAND = re.compile(
    r"'apt',|dpkg --configure|'dpkg', '--purge'|apt-get (?!.*simulate)[^']*(install|update)"
)


def test_each_task_that_changes_packages_waits_for_those_that_others_install():
    seen = set()
    roles = (ROOT / "ansible/roles").rglob("tasks/*.yml")
    for path in [*roles, *(ROOT / "ansible/playbooks").rglob("*.yml")]:
        for task in tasks_of(parsed(path)):
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
    assert seen == {"packages", "driver", "clock", "offline", "bootstrap", "upgrade"}


# Only the third try succeeds. Over ssh the words come in stdout. On a machine without any lists of
# apt's, which DPkg::Lock::Timeout does not wait for, nothing can be installed before.
DPKG = """\
echo >> $HOST.tries
[ $(wc -l < $HOST.tries) -gt 2 ] || { echo 'dpkg: is locked by another process' >&2; exit 2; }
"""
APT_GET = """\
echo >> $HOST.tries
case $1:$HOST in
*:refused) echo 'E: Unable to locate package python3'; exit 100 ;;
update:*) [ $(wc -l < $HOST.tries) -gt 2 ] && { touch $HOST.lists; exit 0; }
    words="E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt)"
    [ $HOST = err ] && echo $words >&2 || echo $words
    exit 100 ;;
*) test -e $HOST.lists || { echo 'E: Unable to locate package python3'; exit 100; } ;;
esac
"""


def test_a_lock_is_waited_for_and_nothing_else_is(tmp_path):
    """Role packages, and bootstrap, which has no Python there, by Ansible itself."""
    path = stand_in(tmp_path, **{"dpkg": DPKG, "apt-get": APT_GET})
    text = (ROOT / "ansible/roles/packages/tasks/purge.yml").read_text()
    text = text.replace("become: true", "become: false").replace("delay: 10", "delay: 0")
    (tmp_path / "purge.yml").write_text(text)
    bare = (ROOT / "ansible/playbooks/bootstrap.yml").read_text()
    bare = bare.replace("/usr/bin/python3", "/nowhere")
    tasks = yaml.safe_load(bare)[0]["pre_tasks"]
    task = next(task for task in tasks if "apt-get" in str(task.get("ansible.builtin.raw")))
    # `raw` knows no environment but that of Ansible's own.
    raw = f"cd {tmp_path}; export HOST={{{{ inventory_hostname }}}}\n" + task["ansible.builtin.raw"]
    purge = {"hosts": "purge", "gather_facts": False, "vars": {"packages_unwanted": ["cowsay"]},
             "environment": {"PATH": path, "HOST": "purge"},
             "tasks": [{"ansible.builtin.import_tasks": "purge.yml"}]}  # fmt: skip
    prepare = {"hosts": "out,err,refused", "gather_facts": False,
               "tasks": [{**task, "ansible.builtin.raw": raw, "delay": 0}]}  # fmt: skip
    hosts = {name: {} for name in ("purge", "out", "err", "refused")}
    said = played(tmp_path, [purge, prepare], 2, hosts, PATH=path)
    recap = said.partition("PLAY RECAP")[2]
    failed = dict(re.findall(r"(\w+) : ok=\d+ .*? failed=(\d)", recap))
    assert failed == {"purge": "0", "out": "0", "err": "0", "refused": "1"}
    tries = {name: (tmp_path / f"{name}.tries").read_text().count("\n") for name in hosts}
    # Once more to install, where the lists came; of the refused one update, and install.
    assert tries == {"purge": 3, "out": 4, "err": 4, "refused": 2}
