"""What a role made is broken on a machine, and the role's own verification says what is wrong."""

import json
import shlex

import pytest
import yaml

CLOCK = "/etc/chrony/conf.d/tandem.conf"
IMAGES = "/srv/tandem/data/digits/val/7"
FIRST = f"{IMAGES}/$(ls {IMAGES} | head -1)"
# role: (what breaks its work on node 1, as root; what its verification says; what mends it).
BREAKS = {
    "identity": (
        "sed -i '1i 127.0.1.1 node4' /etc/hosts",
        "node4 to 127.0.1.1 instead of 192.168.56.114",
        "sed -i 1d /etc/hosts",
    ),
    "base": (
        "systemctl unmask sleep.target",
        "may fall asleep in the middle of a run",
        "systemctl mask sleep.target",
    ),
    "clock": (
        "systemctl stop chrony",
        "the clock of the cluster, gives no time",
        "systemctl start chrony",
    ),
    "sysstat": (
        "chmod -x /usr/bin/iostat",
        "does not write JSON",
        "chmod +x /usr/bin/iostat",
    ),
    "python_env": (
        "ln -sfn /usr /opt/tandem/env",
        "/opt/tandem/env on node1 leads to /usr",
        "ln -sfn $(ls -d /opt/tandem/envs/cpu-* | head -1) /opt/tandem/env",
    ),
    "firewall": (
        "nft delete table inet tandem",
        "no table inet tandem that drops what comes from strangers",
        "systemctl restart tandem-firewall",
    ),
    "data": (
        f"cp -p {FIRST} /root/whole; truncate -s 1 {FIRST}",
        "in 1 places, first <f",
        f"mv /root/whole {FIRST}",
    ),
    "access": (
        "echo 'tandem-admin ALL=(ALL:ALL) PASSWD: ALL' >/etc/sudoers.d/zz-lab",
        "sudo on node1 asks tandem-admin for a password",
        "rm /etc/sudoers.d/zz-lab",
    ),
}
BY_ROOT = ("identity", "base", "clock", "sysstat", "python_env")
BY_USER = ("firewall", "data")
# Its break takes sudo from the user that provisions: another user looks.
BY_STUDENT = ("access",)
STUDENT = {
    "ansible_user": "student",
    "ansible_password": "lab",
    "ansible_become_password": "lab",
    "access_user": "tandem",
    "access_key": "{{ lookup('file', '~/.ssh/id_ed25519.pub') }}",
    "access_admin": "tandem-admin",
    "access_sudo": "nopasswd",
}


# A loop's message is that of its items.
SAID = (
    "{{ ansible_failed_result.results | default([ansible_failed_result])"
    " | map(attribute='msg', default='') | select | join(' ') }}"
)


def play(roles, become):
    """A play in which every role verifies, and a complaint of one does not stop the others."""
    tasks = [
        {
            "name": role,
            "block": [{"include_role": {"name": role, "tasks_from": "verify"}}],
            "rescue": [{"debug": {"msg": f"FOUND {role} {SAID}"}}],
        }
        for role in roles
    ]
    return {"hosts": "node1", "gather_facts": True, "become": become, "tasks": tasks}


def verify(lab, folder, plays, **variables):
    """{role: what its verification said}; those that are content are not in it."""
    (folder / "play.yml").write_text(yaml.safe_dump(plays))
    words = ["-i", "inventory.ini", "-e", json.dumps(variables), str(folder / "play.yml")]
    said = lab.control("ansible-playbook", *words).stdout
    found = {}
    for piece in " ".join(said.split()).split("FOUND ")[1:]:
        role, _, rest = piece.partition(" ")
        found[role] = rest.partition(" TASK [")[0]
    return found


def look(lab, folder, break_it=False):
    """What all verifications say of node 1, as it is or with every role's work broken."""
    facts = {"hosts": "node1", "gather_facts": True, "roles": ["preflight"]}
    groups = (
        ((*BY_ROOT, *BY_USER), [facts, play(BY_ROOT, True), play(BY_USER, False)], {}),
        (BY_STUDENT, [play(BY_STUDENT, True)], STUDENT),
    )
    found = {}
    for roles, plays, variables in groups:
        if break_it:
            as_root(lab, "; ".join(BREAKS[role][0] for role in roles))
        found |= verify(lab, folder, plays, **variables)
    return found


def as_root(lab, line):
    lab.ssh(1, f"echo lab | sudo -S sh -c {shlex.quote(line)}")


@pytest.fixture(scope="module")
def found(provisioned, tmp_path_factory):
    """(what was said of the machine as site.yml left it, and with everything broken)."""
    folder = tmp_path_factory.mktemp("verify")
    clean = look(provisioned, folder)
    try:
        return clean, look(provisioned, folder, break_it=True)
    finally:
        as_root(provisioned, "; ".join(mend for _, _, mend in reversed(BREAKS.values())))


def test_what_site_made_is_found_in_order(found):
    assert found[0] == {}


@pytest.mark.parametrize("role", BREAKS)
def test_the_break_is_named(found, role):
    assert BREAKS[role][1] in found[1].get(role, "nothing")
