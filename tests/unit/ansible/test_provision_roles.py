"""What holds for every role: documented variables, and copies that know whom they copy to."""

import ast
import getpass
import re
import subprocess

import jinja2
import pytest
import yaml

from tests.unit.ansible.provision_machines import ROOT, parsed, played, tasks_of

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
                    # An option might name another ssh.
                    and task[name].get("rsync_opts", ["--sparse"]) == ["--sparse"]
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


# What others than root may change: a home, the data, a share, a run's folder, and where all write.
OTHERS = (
    r"(?:^|[\s\"'])~[/\w{]|\bHOME\b|/home\b|ansible_user_dir|\bdata_root\b|\bnode_dir\b|\bshare_path\b"
    r"|/tmp\b(?!/cuda-installer\.log)|/dev/shm"  # that log is removed alone, from a sticky folder
)
# These act as the user there, or ask how full a disk is; a temporary name nobody knows before.
GUARDED = {"user_key", "user_path", "share_reader", "machine_facts", "tempfile"}
GUARDED_PROGRAMS = {"runuser", "findmnt", "journalctl"}  # the latter two read no such folder
PATHLESS = """
    add_host apt assert debug fail include_role include_tasks import_role import_tasks meta pause
    set_fact set_stats systemd_service"""
# Writes into /etc/fstab, which is root's; systemd mounts at no path that has a link in it.
FSTAB = "Write the line in fstab"
NO_PATHS = {"content", "line", "block", "opts", "word"}
KEYWORDS = {"become", "become_user"}
MODULES = {path.stem for path in (ROOT / "ansible/library").glob("*.py")}


def words_of(value):
    """All text in an argument."""
    if isinstance(value, dict):
        return "\n".join(words_of(part) for key, part in value.items() if key not in NO_PATHS)
    return "\n".join(map(words_of, value)) if isinstance(value, list) else str(value)


def with_variables(pattern, variables):
    """The pattern of paths, and of the variables that hold one, by whatever detour."""
    texts = {name: words_of(value) for name, value in variables.items()}
    while names := [name for name, text in texts.items() if re.search(pattern, text)]:
        pattern += "".join(rf"|\b{name}\b" for name in names)
        texts = {name: text for name, text in texts.items() if name not in names}
    return pattern


def tasks_of_root(rows, inherited=None, variables=None):
    """(task, its blocks' variables) of the tasks that root may carry out: a role does not know
    whether its play says so."""
    for row in rows or []:
        keywords = {**(inherited or {}), **{key: row[key] for key in KEYWORDS & row.keys()}}
        own = {**(variables or {}), **row.get("vars", {})}
        for part in ("block", "rescue", "always", "pre_tasks", "tasks", "post_tasks", "handlers"):
            yield from tasks_of_root(row.get(part), keywords, own)
        if keywords.get("become") is not False and "become_user" not in keywords:
            yield row, own


def paths_of(task):
    """What a task's module gets, as text; none where the module keeps out by itself."""
    for name, value in task.items():
        module = name.rpartition(".")[2]
        if module == "authorized_key":
            yield "~/.ssh"
        if ("." in name or name in MODULES) and module not in {*GUARDED, *PATHLESS.split()}:
            argv = value.get("argv", value.get("cmd", "")) if isinstance(value, dict) else value
            argv = argv if isinstance(argv, list) else str(argv).split()
            if module != "command" or argv[0] not in GUARDED_PROGRAMS:
                yield words_of(value) + words_of(task.get("loop", ""))


def test_root_follows_no_path_of_others():
    """Below a home, the data or a share its owner acts: become_user, runuser, a login as that user
    (become: false), or a module that goes as far as root alone decides."""
    files = [*(ROOT / "ansible/roles").glob("*/*/main.yml"), ROOT / "group_vars/all.yml"]
    kept = [path for path in files if path.parent.name in ("vars", "defaults", "group_vars")]
    settings = {key: value for path in kept for key, value in (parsed(path) or {}).items()}
    known = with_variables(OTHERS, settings)
    books = [ROOT / "site.yml", *(ROOT / "ansible").rglob("*.yml")]
    found = [
        f"{path.relative_to(ROOT)}: {task['name']}"
        for path in books
        for task, variables in tasks_of_root(plays_of(path))
        if task.get("name") != FSTAB
        for text in paths_of(task)
        if re.search(with_variables(known, variables), text)
    ]
    assert found == [], "\n".join(found)


def test_what_root_installed_with_a_umask_of_027_is_made_readable_once(tmp_path):
    (task,) = [
        task
        for task in parsed(ROOT / "ansible/roles/python_env/tasks/main.yml")
        if "python_env_opened" in task.get("register", "")
    ]
    expression = task["ansible.builtin.command"]["argv"]
    argv = ast.literal_eval(jinja2.Template(expression).render(python_env_root=str(tmp_path)))
    program = tmp_path / "envs/cpu/bin/python"
    program.parent.mkdir(parents=True)
    for path, mode in (
        (program, 0o750),
        (tmp_path / "envs/lock", 0o640),
        (tmp_path / "envs", 0o750),
    ):
        path.touch()
        path.chmod(mode)
    said = [subprocess.run(argv, capture_output=True, text=True, check=True) for _ in range(2)]
    assert [done.stdout for done in said] == ["....", ""]  # tmp_path is private, too
    assert [path.stat().st_mode & 0o777 for path in (program, tmp_path / "envs")] == [0o755, 0o755]


def test_without_ansible_user_roles_take_whom_ssh_logs_in_as(tmp_path):
    """User in ~/.ssh/config, which ansible/ssh_config includes; on this machine whoever is here."""
    (tmp_path / "ansible").mkdir()
    (tmp_path / "ansible/ssh_config").write_text("Host 192.168.56.112\n  User anna\n")
    (tmp_path / "ansible.cfg").write_text("")
    hosts = {
        "named": {"ansible_user": "keeper"},
        "by_ssh": {"ansible_connection": "ssh", "ansible_host": "192.168.56.112"},
        "here": {"ansible_connection": "local", "ansible_host": "192.168.56.112"},
    }
    files = ("group_vars/all.yml", "ansible/roles/identity/vars/main.yml")
    play = {
        "hosts": "all",
        "gather_facts": False,
        "vars_files": [f"{ROOT}/{file}" for file in files],
        "tasks": [{"debug": {"msg": "{{ inventory_hostname }} {{ identity_users }}"}}],
    }
    config = {"ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg")}
    text = played(tmp_path, [play], inventory=hosts, **config)
    for host, user in {"named": "keeper", "by_ssh": "anna", "here": getpass.getuser()}.items():
        assert re.search(rf"{host} \[.{user}.\]", text), text


def test_no_role_needs_ansible_user():
    """Roles prove and data log in as another user, and set it."""
    pattern = re.compile(r"\bansible_user\b(?!:)")
    files = (path for role in ROLES for path in role.rglob("*.yml") if path.parent.name != "meta")
    lines = (line.partition("#")[0] for path in files for line in path.read_text().splitlines())
    assert not [line for line in lines if pattern.search(line)]
