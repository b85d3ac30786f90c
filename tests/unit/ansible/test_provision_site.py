"""site.yml itself, by Ansible with stand-ins for its roles: a machine's fault stays its own."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.ansible.provision_machines import ROOT

# What a stand-in does: it fails where it is told to, and says that it was there where it is not.
STAND_IN = """\
- name: Stand-in
  ansible.builtin.fail: {msg: "broken here"}
  when: (ansible_role_name | default(role_name)) ~ '@' ~ inventory_hostname in broken
- name: Say that it was here
  ansible.builtin.debug:
    msg: "ran {{ ansible_role_name | default(role_name) }}@{{ inventory_hostname }}"
"""
ROLES = sorted(path.name for path in (ROOT / "ansible/roles").iterdir())
# reach sorts machines by `raw`'s answers; python_env's report is what is tested.
REAL = {"reach": ["tasks/main.yml", "tasks/report.yml", "vars/main.yml"],
        "python_env": ["tasks/untried.yml"]}  # fmt: skip

UPGRADE = "ansible/playbooks/upgrade.yml"
FREE = "ansible/playbooks/tasks/free.yml"
MACHINE_ID = Path("/etc/machine-id").read_text().strip()
# These roles download nothing: they copy from the control machine.
FROM_HERE = {"offline", "bundle", "pycharm"}


@pytest.fixture(scope="module")
def roles(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    for name in ROLES:
        tasks = folder / name / "tasks"
        tasks.mkdir(parents=True)
        for file in (ROOT / "ansible/roles" / name / "tasks").glob("*.yml"):
            text = STAND_IN if file.stem in ("main", "kernel") else "---\n[]\n"
            (tasks / file.name).write_text(text)
        for file in REAL.get(name, []):
            (folder / name / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / "ansible/roles" / name / file, folder / name / file)
    return folder


def site(roles, folder, broken, book="site.yml", in_use=()):
    """(words that it printed, exit code) of a playbook on four machines that are this one.

    By their facts each has a card, and pc1 is the control machine. in_use: where somebody trains.
    """
    hosts = {}
    for name in ("pc1", "pc2", "pc3", "pc4"):
        facts = {"machine_id": MACHINE_ID if name == "pc1" else name, "gpus": [{"vendor": "10de"}]}
        hosts[name] = {"ansible_connection": "local", "preflight_facts": facts}
        names = "0: 2 0 0 2 1 7 @tandem/7/some-run/anna@desk\n" if name in in_use else ""
        (folder / f"{name}.unix").write_text(names)
    variables = {"broken": broken, "ansible_become": False, "require_all": False}
    variables |= {"share_protocol": "local", "driver_policy": "install", "proxy_environment": {}}
    groups = {"cluster": {"hosts": hosts, "vars": variables}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(groups))
    (folder / FREE).parent.mkdir(parents=True)
    for name in ("site.yml", UPGRADE, FREE):
        text = (ROOT / name).read_text()
        text = text.replace("gather_facts: true", "gather_facts: false")
        text = text.replace("/proc/net/unix", f"{folder}/{{{{ inventory_hostname }}}}.unix")
        (folder / name).write_text(text.replace("become: true", "become: false"))
    variables = {
        "ANSIBLE_ROLES_PATH": str(roles),
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_GATHERING": "explicit",
    }
    argv = ["ansible-playbook", "--inventory", str(folder / "hosts.yml"), str(folder / book)]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **variables})
    return " ".join(done.stdout.split()), done.returncode


def recap(said):
    """{machine: whether it went to the end}."""
    rows = said.partition("PLAY RECAP")[2].split("pc")[1:]
    return {f"pc{row.split()[0]}": "failed=0" in row for row in rows}


DOWNLOADS = re.compile(
    r"get_url:|ansible\.builtin\.(apt|git):|name: packages$|pip_index_url", re.MULTILINE
)


def roles_of(play):
    """The names of the roles that a play applies, in any way."""
    return [name for name in ROLES if re.search(rf"[\s\['\"]{name}[\s\],'\"]", str(play))]


def test_each_play_that_downloads_goes_through_the_proxy():
    seen = []
    plays = yaml.safe_load((ROOT / "site.yml").read_text())
    for play in (play for play in plays if play["hosts"] == "reachable"):
        for role in roles_of([play.get("roles"), play.get("tasks")]):
            tasks = (ROOT / "ansible/roles" / role / "tasks").glob("*.yml")
            if role not in FROM_HERE and any(DOWNLOADS.search(file.read_text()) for file in tasks):
                seen.append(role)
                assert play.get("environment") == "{{ proxy_environment }}", (play["name"], role)
    assert {"python_env", "driver", "base", "cuda", "sysstat"} <= set(seen)


def test_machines_that_fail_take_no_other_along_not_even_the_first_ones_python(roles, tmp_path):
    said, code = site(roles, tmp_path, ["clock@pc1", "driver@pc3", "python_env@pc2"])
    ended = {"pc1": False, "pc2": False, "pc3": False, "pc4": True}
    assert code == 2 and recap(said) == ended
    assert "That was pc2, and there it failed (see above)" in said
    assert "So it was not tried on pc4." in said
    assert "ran sysstat@pc4" in said and "ran python_env@pc4" not in said
    after = said.partition("PLAY [Install NVIDIA's apex")[2]
    assert "PLAY [Let members in and keep strangers out]" in after and "broken here" not in after


def test_an_upgrade_stops_at_the_first_that_fails_and_takes_the_control_machine_last(
    roles, tmp_path
):
    said, code = site(roles, tmp_path, ["driver@pc3"], UPGRADE)
    assert code == 2 and not recap(said)["pc3"] and sum(recap(said).values()) == 3
    assert "broken here Upgrading stopped at pc3; not touched yet: pc4, pc1." in said
    assert "PLAY [Let members in and keep strangers out]" not in said


def test_an_upgrade_stops_at_a_machine_that_trains_and_names_its_run(roles, tmp_path):
    said, code = site(roles, tmp_path, [], UPGRADE, in_use=["pc3"])
    assert code == 2 and not recap(said)["pc3"]
    told = "pc3 is in use by anna@desk: run some-run. It was not upgraded. Wait for its end"
    assert told in said and "Upgrading stopped at pc3; not touched yet: pc4, pc1." in said
