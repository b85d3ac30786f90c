"""Rules that only a role's text holds: what is kept, tried, read again, or may not fail.

Each was found by breaking the role: no other test noticed.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.ansible.provision_machines import ROOT
from tests.unit.ansible.test_provision_packages import tasks_of

ROLES = ROOT / "ansible/roles"


def tasks(path):
    return list(tasks_of(yaml.safe_load((ROLES / path).read_text())))


def played(folder: Path, variables: dict, rows: list, code: int = 0) -> str:
    """What Ansible prints of these tasks on this machine, when it ends with `code`."""
    play = {"hosts": "localhost", "gather_facts": False, "vars": variables, "tasks": rows}
    (folder / "book.yml").write_text(yaml.safe_dump([play]))
    argv = ["ansible-playbook", "-c", "local", "-i", "localhost,", str(folder / "book.yml")]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout
    return " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("name", "cuda", "before", "after"),
    [
        ("cu126", "12.6", None, "stack: cu126"),
        ("cpu", None, None, None),  # the cards are only off today
        ("cu126", "12.6", "stack: cu126 # mine\n", "stack: cu126 # mine"),
    ],
)
def test_what_auto_decided_is_kept_if_it_has_cards_and_a_persons_file_stays(
    tmp_path, name, cuda, before, after
):
    file = tmp_path / "inventory.stack.yml"
    if before:
        file.write_text(before)
    variables = {"stack": "auto", "preflight_kept_file": str(file)}
    variables["preflight_stack"] = {"name": name, "cuda": cuda}
    rows = yaml.safe_load((ROLES / "preflight/tasks/keep.yml").read_text())
    played(tmp_path, variables, rows)
    assert (file.read_text().splitlines()[-1] if file.exists() else None) == after


@pytest.mark.parametrize(
    ("folder", "settings"), [(True, "nfs.conf"), (False, "nfs-server.service")]
)
def test_an_nfs_server_without_a_folder_of_settings_gets_arguments(tmp_path, folder, settings):
    """nfs-utils 1.3.4 of Ubuntu 18.04 and 20.04 and Debian 11."""
    variables = yaml.safe_load((ROLES / "share_server/vars/main.yml").read_text())
    variables = {key: value for key, value in variables.items() if "settings" in key
                 or key in ("share_server_conf", "share_server_drop_ins")}  # fmt: skip
    variables["share_server_conf_d"] = {"stat": {"exists": folder}}
    asked = "{{ share_server_settings_template }} {{ share_server_settings_file }}"
    said = played(tmp_path, variables, [{"ansible.builtin.debug": {"msg": asked}}])
    file = "/etc/nfs.conf.d" if folder else "/etc/systemd/system/nfs-server.service.d"
    assert f"{settings}.j2 {file}/tandem.conf" in said
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
    rows = tasks("driver/tasks/reboot_first.yml")
    steps = [
        row.get("ansible.builtin.include_tasks") or str(*row.get("ansible.builtin.set_fact", {}))
        for row in rows
    ]
    assert steps[-4:-1] == ["reboot.yml", "facts.yml", "driver_planned"]
    assert "ansible.builtin.fail" in rows[-1]


def test_a_source_of_apt_that_is_gone_hinders_no_update_but_that_of_the_bundle():
    seen = {}
    for path in sorted(ROLES.glob("*/tasks/*.yml")):
        for row in tasks(path.relative_to(ROLES)):
            if row.get("ansible.builtin.apt", {}).get("update_cache"):
                seen.setdefault(path.parts[-3], set()).add(row.get("failed_when"))
    assert seen == {"packages": {False}, "driver": {False}, "offline": {None}}


def test_only_what_apt_planned_is_recorded_as_ours():
    """What others install meanwhile stays when uninstall.yml purges."""
    (driver,) = [row for row in tasks("driver/tasks/record.yml") if "new" in row.get("vars", {})]
    assert driver["vars"]["new"] == "{{ came | intersect(driver_by_plan.stdout_lines) }}"
    names = yaml.safe_load((ROLES / "packages/vars/main.yml").read_text())
    assert "packages_simulated.stdout | tandem_packages_planned" in names["packages_new"]


def test_an_installer_that_is_another_file_than_was_named_is_never_run(tmp_path):
    (tmp_path / "here.run").write_text("another file")
    folder, planned = tmp_path / "t", {"url": "https://x.invalid/a.run", "sha256": "0" * 64}
    variables = {"driver_temporary": str(folder), "driver_file": str(folder / "a.run")}
    variables |= {"driver_here": str(tmp_path / "here.run"), "driver_planned": planned}
    rows = yaml.safe_load((ROLES / "driver/tasks/fetch.yml").read_text())
    said = played(tmp_path, variables, rows, code=2)
    assert "The SHA-256 of https://x.invalid/a.run is" in said and "nothing was installed" in said
    fetched = tasks("driver/tasks/fetch.yml")[2]["ansible.builtin.get_url"]
    assert fetched["checksum"] == "sha256:{{ driver_planned.sha256 }}"
    first, *_ = yaml.safe_load((ROLES / "driver/tasks/act.yml").read_text())[0]["block"]
    assert first["ansible.builtin.include_tasks"] == "fetch.yml"


def test_no_machine_is_switched_off_before_all_were_seen_to_be_free():
    plays = yaml.safe_load((ROOT / "ansible/playbooks/poweroff.yml").read_text())
    steps = [[str(task) for task in tasks_of(play.get("tasks"))] for play in plays]
    free, off = (
        [place for place, rows in enumerate(steps) if any(words in row for row in rows)]
        for words in ("tasks/free.yml", "systemctl poweroff")
    )
    # A play of its own, which ends for all machines before the next one begins.
    assert len(free) == len(off) == 1 and free < off
    assert plays[free[0]].get("any_errors_fatal") is True
