"""systemd-oomd and the user that trains: taken from it by a setting where it heeds no user's wish.

The programs are systemd's own, of Debian 11 (247, older than 252 as Ubuntu 22.04's 249) and Debian
12 (252). systemd-oomd itself is an empty file: the lab's machines have no limits on memory.
"""

import pytest

from tests.lab.site_plays import changes, play, reboot

# As Ubuntu's package sets it for all users. source: ubuntu-devel, 31 January 2022 ("a
# MemoryPressureLimit of 50% for user sessions", systemd 249.9-0ubuntu2).
PLANT = """
touch /usr/lib/systemd/systemd-oomd; cd /usr/lib/systemd/system; mkdir -p user@.service.d
printf "[Service]\\nManagedOOMMemoryPressure=kill\\n" >user@.service.d/10.conf
systemctl daemon-reload
"""
PLAY = """\
- name: Spare the user that trains
  hosts: cluster
  become: true
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: base, tasks_from: FILE}
"""
ASKED = "systemctl show --property=ManagedOOMMemoryPressure --value user@$(id -u {}).service"


@pytest.fixture(scope="module")
def machines(start_lab):
    lab = start_lab("oomd", "--nodes", "2", "--release", "bookworm,bullseye", "--no-bundle")
    for node in (1, 2):
        lab.ssh(node, f"sudo sh -ec '{PLANT}'")
    return lab


def pressure(lab, node, user="tandem"):
    return lab.ssh(node, ASKED.format(user)).strip()


def test_an_older_systemd_spares_the_user_that_trains_and_nobody_else(machines, tmp_path):
    for name in ("session", "uninstall"):
        (tmp_path / f"{name}.yml").write_text(PLAY.replace("FILE", name))
    words = [str(tmp_path / "session.yml"), "--limit", "node1,node2"]
    assert [pressure(machines, node) for node in (1, 2)] == ["kill", "kill"]
    assert changes(play(machines, "--check", *words))["node2"] > 0
    assert pressure(machines, 2) == "kill"
    play(machines, *words)
    assert [pressure(machines, node) for node in (1, 2)] == ["kill", "auto"]  # 252 heeds the run
    assert pressure(machines, 2, "nobody") == "kill"
    assert changes(play(machines, *words)) == {"node1": 0, "node2": 0}
    reboot(machines, 2)
    assert pressure(machines, 2) == "auto"
    play(machines, str(tmp_path / "uninstall.yml"), *words[1:])
    assert pressure(machines, 2) == "kill"
    left = "ls -d /etc/systemd/system.control/user@* /var/lib/tandem/base 2>/dev/null || true"
    assert machines.ssh(2, left) == ""
