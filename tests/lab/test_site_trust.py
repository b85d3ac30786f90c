"""What a machine that lies, or one that answers in its stead, gets from provisioning: nothing."""

import json

import pytest

from tests.lab.site_plays import changes, failures, play, said, write_inventory

AGENT = "/tmp/of-the-agent"
# In rsync's place: what somebody on that machine can ask of the agent of whoever copies to it.
LISTENING = f"""#!/bin/sh
{{ echo "socket ${{SSH_AUTH_SOCK:-none}}"; ssh-add -l; }} >> {AGENT} 2>&1
exec /usr/bin/rsync.real "$@"
"""
# Ansible's own connection stays open while the host key is forgotten: whoever answers the next one
# is unknown.
PLAY = """
- name: Copies under test
  hosts: cluster
  gather_facts: false
  tasks:
    - name: Connect
      ansible.builtin.ping:
    - name: Forget the host keys
      ansible.builtin.copy: {content: "", dest: ~/.ssh/known_hosts, mode: "0600"}
      delegate_to: localhost
      when: forget | default(false) | bool
    - name: Copy
      ansible.builtin.include_role: {name: data}
"""


@pytest.fixture
def copying(pair, tmp_path):
    """The pair, and the words of a play that copies a small data set to node1."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / "data/small" / split / name).mkdir(parents=True)
            (tmp_path / "data/small" / split / name / "1.png").write_bytes(b"an image")
    (tmp_path / "play.yml").write_text(PLAY)
    hosts = write_inventory(tmp_path, {"node1": "ansible_host=192.168.56.111"})
    given = {
        "data_root": "/srv/tandem/data",
        "data_sets": ["small"],
        "data_source": str(tmp_path / "data"),
        "node_dir": "tandem",
        "run_user": "tandem",
    }
    return pair, [str(tmp_path / "play.yml"), "--inventory", hosts, "-e", json.dumps(given)]


def test_data_go_to_no_machine_whose_key_is_unknown(copying):
    lab, words = copying
    done = play(lab, *words, "-e", "forget=true", check=False)
    assert done.returncode != 0 and "Host key verification failed" in said(done), done.stdout
    assert lab.ssh(1, "find /srv/tandem/data -type f") == ""


def test_no_copy_forwards_the_agent(copying, tmp_path):
    lab, words = copying
    (tmp_path / "rsync").write_text(LISTENING)
    lab.ssh(1, "sudo mv /usr/bin/rsync /usr/bin/rsync.real")
    lab.ssh(1, "sudo tee /usr/bin/rsync; sudo chmod 755 /usr/bin/rsync", input=LISTENING)
    user = 'echo "Host *\n ForwardAgent yes" > ~/.ssh/config; ssh-add ~/.ssh/id_ed25519; exec "$@"'
    agent = ("ssh-agent", "sh", "-c", user, "sh")
    plain = ("ssh", "tandem@192.168.56.111", "rsync --version")
    lab.control(*agent, *plain)
    assert "control@lab" in lab.ssh(1, f"cat {AGENT}")  # so much a forwarded agent gives away
    lab.ssh(1, f"sudo rm {AGENT}")
    lab.control(*agent, "ansible-playbook", *words)
    heard = lab.ssh(1, f"cat {AGENT}")
    assert "socket none" in heard and "control@lab" not in heard
    assert lab.ssh(1, "find /srv/tandem/data -type f | wc -l") == "4\n"


PROVISION = """
- name: Keys under test
  hosts: cluster
  become: true
  gather_facts: true
  gather_subset: [min]
  roles: [identity]
- name: Copies under test
  hosts: cluster
  gather_facts: false
  roles: [data]
"""
# What the user that trains puts in root's way, and how that is taken back.
LINKS = {
    "ssh": ("mv ~/.ssh ~/kept; ln -s /etc/target ~/.ssh", "rm ~/.ssh; mv ~/kept ~/.ssh"),
    "authorized_keys": (
        "cp ~/.ssh/authorized_keys kept; ln -sf /etc/target/file ~/.ssh/authorized_keys",
        "mv ~/kept ~/.ssh/authorized_keys",
    ),
    "data": (
        "mv /srv/of/data /srv/of/kept; ln -s /etc/target /srv/of/data",
        "rm /srv/of/data; mv /srv/of/kept /srv/of/data",
    ),
}


@pytest.fixture
def provisioning(copying, tmp_path):
    """The pair, the words of a play as tandem-admin, for whom tandem trains in a folder of its own,
    and a way to type there as each of the two."""
    lab, words = copying
    (tmp_path / "play.yml").write_text(PROVISION)
    variables = "ansible_host=192.168.56.111 ansible_user=tandem-admin"
    hosts = write_inventory(tmp_path, {"node1": variables})
    users = {"login_user": "tandem-admin", "run_user": "tandem"}
    settings = json.loads(words[-1]) | users | {"data_root": "/srv/of/data"}

    def admin(line):
        return lab.control("ssh", "tandem-admin@192.168.56.111", f"sudo sh -c '{line}'").stdout

    admin("mkdir -p /etc/target /srv/of; echo of root > /etc/target/file; chown tandem /srv/of")
    yield lab, [words[0], "--inventory", hosts, "-e", json.dumps(settings)], admin
    admin("rm -r /etc/target /srv/of")


def test_root_follows_no_link_of_a_user(provisioning):
    lab, words, admin = provisioning
    play(lab, *words)
    target = 'stat -c "%U:%G %a %n" /etc/target /etc/target/*; cat /etc/target/file'
    before = admin(target)
    for line, undo in LINKS.values():
        lab.ssh(1, line)
        done = play(lab, *words, check=False)
        admin(f'su tandem -c "{undo}"')
        assert admin(target) == before
        assert failures(done) == {"node1"} and "as tandem, " in said(done), said(done)
    assert changes(play(lab, *words)) == {"node1": 0}
