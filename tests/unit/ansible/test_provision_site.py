"""site.yml itself, by Ansible with stand-ins for its roles: a machine's fault stays its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.ansible.provision_machines import ROOT, played

# A stand-in of one of SEEN; those of other roles do nothing.
STAND_IN = """\
- name: Stand-in
  ansible.builtin.debug: {msg: "{{ 'broken here' if here in broken else 'ran ' ~ here }}"}
  failed_when: here in broken
  vars:
    here: "{{ (ansible_role_name | default(role_name)) ~ '@' ~ inventory_hostname }}"
"""
SEEN = ("clock", "driver", "python_env", "sysstat")
ROLES = sorted(path.name for path in (ROOT / "ansible/roles").iterdir())
# reach sorts machines by `raw`'s answers; python_env's report is what is tested.
REAL = {"reach": ["tasks/main.yml", "tasks/report.yml", "vars/main.yml", "defaults/main.yml"],
        "python_env": ["tasks/untried.yml"]}  # fmt: skip
LOOKS = "ansible_play_hosts_all | map('extract', hostvars) | tandem_looks"

UPGRADE = "ansible/playbooks/upgrade.yml"
FREE = "ansible/playbooks/tasks/free.yml"
MACHINE_ID = Path("/etc/machine-id").read_text().strip()
# These roles download nothing: they copy from the control node.
FROM_HERE = {"offline", "bundle", "pycharm"}


@pytest.fixture(scope="module")
def roles(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    for name in ROLES:
        tasks = folder / name / "tasks"
        tasks.mkdir(parents=True)
        for file in (ROOT / "ansible/roles" / name / "tasks").glob("*.yml"):
            seen = name in SEEN and file.stem == "main"
            text = STAND_IN if seen else "---\n[]\n"
            (tasks / file.name).write_text(text)
        for file in REAL.get(name, []):
            (folder / name / file).parent.mkdir(exist_ok=True)
            text = (ROOT / "ansible/roles" / name / file).read_text()
            (folder / name / file).write_text(text.replace(LOOKS, "[]"))  # whatever this one is
    return folder


PLANNED = """
- ansible.builtin.set_fact:
    driver_upgrade: {action: upgrade, kernel: false, without: ""}
"""


def site(roles, folder, broken, book="site.yml", in_use=()):
    """What a playbook printed before it failed on machines that are this one.

    By their facts each has a card, and pc1 is the control node. in_use: where somebody trains.
    """
    variables = {"broken": broken, "ansible_become": False, "require_all": False,
                 "share_protocol": "local", "driver_policy": "install", "proxy_environment": {},
                 "ansible_connection": "local"}  # fmt: skip
    hosts = {}
    for name in ("pc1", "pc2", "pc3"):
        facts = {"machine_id": MACHINE_ID if name == "pc1" else name, "gpus": [{"vendor": "10de"}]}
        hosts[name] = {**variables, "preflight_facts": facts}
        marks = "0: 2 0 0 2 1 7 @tandem/7/some-run/anna@desk\n" if name in in_use else ""
        (folder / f"{name}.unix").write_text(marks)
    (folder / "tasks").mkdir()
    (folder / "tasks/plan_upgrade.yml").write_text(PLANNED)
    for name in {"site.yml", book, FREE}:
        text = (ROOT / name).read_text()
        text = text.replace("gather_facts: true", "gather_facts: false")
        text = text.replace("/proc/net/unix", f"{folder}/{{{{ inventory_hostname }}}}.unix")
        text = text.replace("import_playbook: ../../site.yml", "import_playbook: site.yml")
        text = text.replace("import_tasks: tasks/free.yml", "import_tasks: free.yml")
        (folder / Path(name).name).write_text(text.replace("become: true", "become: false"))
    text = (folder / Path(book).name).read_text()
    plans = {"ANSIBLE_ROLES_PATH": str(roles), "ANSIBLE_GATHERING": "explicit"}
    return played(folder, text, 2, hosts, **plans)


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
    said = site(roles, tmp_path, ["clock@pc1", "python_env@pc2"])
    assert recap(said) == {"pc1": False, "pc2": False, "pc3": True}
    assert "That was pc2, and there it failed (see above)" in said
    assert "So it was not tried on pc3." in said
    assert "ran sysstat@pc3" in said and "ran python_env@pc3" not in said
    after = said.partition("PLAY [Install NVIDIA's apex")[2]
    assert "PLAY [Let members in and keep strangers out]" in after and "broken here" not in after


def test_an_upgrade_stops_at_the_first_that_trains(roles, tmp_path):
    """As at one that fails; it takes the control node last."""
    said = site(roles, tmp_path, [], UPGRADE, in_use=["pc3"])
    assert "Upgrading stopped at pc3; not touched yet: pc1." in said
    assert recap(said) == {"pc1": True, "pc2": True, "pc3": False}
    assert "ran driver@pc2" in said and "ran driver@pc3" not in said
    assert "pc3 is in use by anna@desk: run some-run. It was not upgraded." in said
    assert "PLAY [Let members in and keep strangers out]" not in said


def test_playbooks_have_the_settings_whatever_inventory_is_given(tmp_path):
    """Ansible looks for group_vars beside the inventory and beside the playbook alone."""
    inventory = tmp_path / "inventory.ini"
    inventory.write_text("[cluster]\nnode1 ansible_host=192.168.56.111\n")
    argv = [sys.executable, "-m", "ansible", "inventory", "--inventory", str(inventory)]
    argv += ["--playbook-dir", str(ROOT / "ansible/playbooks"), "--host", "node1"]
    printed = subprocess.run(argv, capture_output=True, check=True, cwd=ROOT).stdout
    assert json.loads(printed)["require_all"] is False
