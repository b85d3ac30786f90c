"""What holds for every role: documented variables, and copies that know whom they copy to."""

import pytest
import yaml

from tests.unit.ansible.provision_machines import ROOT, parsed, tasks_of

ROLES = sorted(path for path in (ROOT / "ansible/roles").iterdir() if path.is_dir())


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_variables_are_documented(role):
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    documented = {name for spec in specs.values() for name in spec.get("options", {})}
    defaults = role / "defaults/main.yml"
    if defaults.exists():
        assert set(yaml.safe_load(defaults.read_text())) <= documented


def plays_of(path):
    """Plays or tasks of a file; vars and the like have none."""
    rows = parsed(path)
    return rows if isinstance(rows, list) else []


def test_every_copy_knows_the_host_key_and_takes_no_agent_along():
    """Of itself synchronize reads neither ansible.cfg nor known_hosts, and trusts any server."""
    found = {}
    for path in [ROOT / "site.yml", *(ROOT / "ansible").rglob("*.yml")]:
        for task in tasks_of(plays_of(path)):
            for name in {"synchronize", "ansible.posix.synchronize"} & task.keys():
                found[f"{path.relative_to(ROOT)}: {task['name']}"] = (
                    isinstance(task[name], dict)
                    and task[name].get("verify_host") is True
                    and task[name].get("use_ssh_args") is True
                    and "rsync_opts" not in task[name]  # which may name another ssh
                    and "mode" not in task[name]  # a machine's files are not copied here
                )
    assert len(found) >= 6
    assert not [name for name, right in found.items() if not right]


def test_the_folder_of_environments_is_fixed_and_the_same_everywhere():
    root = yaml.safe_load((ROOT / "ansible/roles/python_env/vars/main.yml").read_text())
    root = root["python_env_root"]
    documented = (ROOT / "ansible/roles/python_env/meta/argument_specs.yml").read_text()
    assert "python_env_root" not in documented
    settings = yaml.safe_load((ROOT / "group_vars/all.yml").read_text())
    assert settings["env_python"] == f"{root}/env/bin/python"
    space = yaml.safe_load((ROOT / "ansible/roles/preflight/defaults/main.yml").read_text())
    assert root in [row["folder"] for row in space["preflight_space"]]
    for path in ("ansible/library/machine_facts.py", "ansible/playbooks/uninstall.yml"):
        assert f"{root}/env" in (ROOT / path).read_text()
