"""Rules that only a role's text holds: what is kept, tried, read again, or may not fail.

Each came to light by breaking the role: no other test noticed.
"""

import re

import yaml

from tests.unit.ansible.provision_machines import ROOT, ansible_playbook, parsed, tasks_of

ROLES = ROOT / "ansible/roles"


def tasks(path):
    return list(tasks_of(parsed(ROLES / path)))


INSTALLER = {"action": "runfile", "url": "https://x.invalid/a.run", "sha256": "0" * 64}
# What `auto` decided is kept if it has cards, and a person's file stays. An NFS server without a
# folder of settings, as nfs-utils 1.3.4 of Ubuntu 18.04 and 20.04 and Debian 11, gets arguments.
PLAYS = {
    "cards": {"preflight_stack": {"name": "cu126", "cuda": "12.6"}},
    "off": {"preflight_stack": {"name": "cpu", "cuda": None}},  # the cards are only off today
    "mine": {"preflight_stack": {"name": "cu126", "cuda": "12.6"}},
    "new_nfs": {"share_server_conf_d": {"stat": {"exists": True}}},
    "old_nfs": {"share_server_conf_d": {"stat": {"exists": False}}},
    "installer": {"driver_planned": INSTALLER, "driver_nouveau_allowed": False},
}


def test_what_roles_decide_by_themselves(tmp_path):
    """By Ansible itself, all in one."""
    (tmp_path / "mine").write_text("stack: cu126 # mine\n")
    files = {name: {"preflight_kept_file": str(tmp_path / name)} for name in PLAYS}
    hosts = {name: {**files[name], "stack": "auto", **said} for name, said in PLAYS.items()}
    keep = yaml.safe_load((ROLES / "preflight/tasks/keep.yml").read_text())
    server = yaml.safe_load((ROLES / "share_server/vars/main.yml").read_text())
    asked = "{{ share_server_settings_template }} {{ share_server_settings_file }}"
    # An installer that is another file than was named is never run.
    (tmp_path / "here.run").write_text("another file")
    fetch = yaml.safe_load((ROLES / "driver/tasks/prepare.yml").read_text())[:1]
    files = {"temporary": "t", "file": "t/a.run", "here": "here.run"}
    hosts["installer"] |= {f"driver_{name}": f"{tmp_path}/{file}" for name, file in files.items()}
    done = ansible_playbook(
        tmp_path,
        [
            {"hosts": "cards,off,mine", "gather_facts": False, "tasks": keep},
            {"hosts": "new_nfs,old_nfs", "gather_facts": False, "vars": server,
             "tasks": [{"ansible.builtin.debug": {"msg": asked}}]},
            {"hosts": "installer", "gather_facts": False, "tasks": fetch},
        ],
        inventory=hosts,
    )  # fmt: skip
    failed = re.findall(r"^(\w+) .* failed=[1-9]", done.stdout, re.MULTILINE)
    assert done.returncode == 2 and failed == ["installer"], done.stdout
    # In one line, however long, where it is no terminal.
    assert re.search(r"The SHA-256 of https://x.invalid/a.run is .{80}", done.stdout)
    said = " ".join(done.stdout.split())
    assert (tmp_path / "cards").read_text().splitlines()[-1] == "stack: cu126"
    assert not (tmp_path / "off").exists()
    assert (tmp_path / "mine").read_text() == "stack: cu126 # mine\n"
    assert "nfs.conf.j2 /etc/nfs.conf.d/tandem.conf" in said
    service = "/etc/systemd/system/nfs-server.service.d/tandem.conf"
    assert f"nfs-server.service.j2 {service}" in said
    text = (ROLES / "share_server/templates/nfs-server.service.j2").read_text()
    # systemd adds a second ExecStart unless the first one is emptied.
    assert re.search(r"^ExecStart=\nExecStart=/usr/sbin/rpc\.nfsd ", text, re.MULTILINE)


def test_rules_of_the_firewall_name_no_priority():
    """nft 0.8.2 of Ubuntu 18.04 knows numbers alone."""
    texts = [path.read_text() for path in (ROLES / "firewall/templates").glob("*.nft.j2")]
    found = [word for text in texts for word in re.findall(r"priority ([^;\s]+)", text)]
    assert found and all(re.fullmatch(r"-?\d+", word) for word in found)


def test_whether_sudo_works_is_found_by_becoming_root():
    """-K sets no variable; the facts themselves are read without root."""
    rows = tasks("preflight/tasks/findings.yml")
    (tried,) = [row for row in rows if row.get("become") is True]
    assert tried["ansible.builtin.command"] == "id -u"
    (kept,) = [row for row in rows if row["name"] == "Keep the facts"]
    assert kept["vars"]["preflight_own"]["sudo"] == f"{{{{ {tried['register']}.stdout == '0' }}}}"


def test_after_a_reboot_the_machine_is_looked_at_and_planned_anew():
    rows = tasks("driver/tasks/main.yml")
    steps = [row.get("ansible.builtin.include_tasks") for row in rows]
    reboot = steps.index("reboot.yml")
    assert steps[reboot + 1] == "look.yml" and rows[reboot + 1]["vars"]["driver_plans"] == "driver"
    assert "ansible.builtin.fail" in rows[reboot + 2]


def test_a_source_of_apt_that_is_gone_hinders_no_update_but_that_of_the_bundle():
    seen = {}
    for path in sorted(ROLES.glob("*/tasks/*.yml")):
        for row in tasks(path.relative_to(ROLES)):
            if row.get("ansible.builtin.apt", {}).get("update_cache"):
                seen.setdefault(path.parts[-3], set()).add(row.get("failed_when"))
    assert seen == {"packages": {False}, "driver": {False}, "offline": {None}}


def test_only_what_apt_planned_is_recorded_as_ours():
    """What others install meanwhile stays when uninstall.yml purges."""
    (driver,) = [row for row in tasks("driver/tasks/packages.yml") if "new" in row.get("vars", {})]
    assert driver["vars"]["new"] == "{{ came | intersect(driver_by_plan.stdout_lines) }}"
    names = yaml.safe_load((ROLES / "packages/vars/main.yml").read_text())
    assert "packages_simulated.stdout | tandem_packages_planned" in names["packages_new"]
