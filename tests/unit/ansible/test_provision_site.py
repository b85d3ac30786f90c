"""site.yml itself, by Ansible, with stand-ins for its roles: one machine's fault stays its own."""

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
"""
ROLES = sorted(path.name for path in (ROOT / "ansible/roles").iterdir())
# reach sorts machines by what `raw` answers, python_env's report is what is tested.
REAL = {"reach": ["tasks/main.yml", "tasks/report.yml", "vars/main.yml"],
        "python_env": ["tasks/untried.yml"]}  # fmt: skip

# These bring what the control machine has.
FROM_HERE = {"offline", "bundle", "pycharm"}


@pytest.fixture(scope="module")
def roles(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    for name in ROLES:
        tasks = folder / name / "tasks"
        tasks.mkdir(parents=True)
        for file in (ROOT / "ansible/roles" / name / "tasks").glob("*.yml"):
            text = STAND_IN if file.stem == "main" else "---\n[]\n"
            (tasks / file.name).write_text(text)
        for file in REAL.get(name, []):
            (folder / name / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / "ansible/roles" / name / file, folder / name / file)
    return folder


def site(roles, folder, broken):
    """(words that it printed, exit code) of site.yml on three machines that are this one."""
    hosts = {name: {"ansible_connection": "local"} for name in ("pc1", "pc2", "pc3")}
    variables = {"broken": broken, "ansible_become": False, "require_all": False}
    variables["share_protocol"] = "local"
    groups = {"cluster": {"hosts": hosts, "vars": variables}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(groups))
    book = folder / "site.yml"
    book.write_text((ROOT / "site.yml").read_text().replace("become: true", "become: false"))
    variables = {"ANSIBLE_ROLES_PATH": str(roles), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    argv = ["ansible-playbook", "--inventory", str(folder / "hosts.yml"), str(book)]
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
    """Names of the roles that a play applies, in whatever way."""
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


def test_where_the_first_machines_python_fails_the_others_go_on_and_are_named(roles, tmp_path):
    said, code = site(roles, tmp_path, ["python_env@pc1"])
    assert code == 2 and recap(said) == {"pc1": False, "pc2": True, "pc3": True}
    assert "That was pc1, and there they failed" in said
    assert "So they were not tried on pc2, pc3." in said
    after = said.partition("PLAY [NVIDIA's apex")[2]
    assert "PLAY [Members in, strangers out]" in after and "broken here" not in after


def test_machines_that_fail_take_no_other_along_and_the_first_in_order_is_tried_first(
    roles, tmp_path
):
    said, code = site(roles, tmp_path, ["clock@pc1", "driver@pc3"])
    assert code == 2 and recap(said) == {"pc1": False, "pc2": True, "pc3": False}
    assert "they were not tried" not in said
