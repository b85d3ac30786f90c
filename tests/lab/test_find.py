"""`make find` among machines with a real sshd."""

import re

NET = "192.168.56.0/24"
WHOLE = [f"node{n} ansible_host=192.168.56.11{n}" for n in (1, 2, 3, 4)]


def test_machines_are_found_a_stranger_is_shown_and_what_is_listed_stays(start_lab, tmp_path):
    lab = start_lab("find", "--nodes", "4", "--no-bundle")
    file = tmp_path / "pcs.ini"
    file.write_text("[cluster]\n")

    def find(*words, check=True):
        words = [f"INVENTORY={file}", *words]
        done = lab.control("python", "-m", "launcher", "find", *words, check=check)
        return done, re.findall(r"^#?\w+ ansible_host=[0-9.]+", done.stdout, re.MULTILINE)

    assert find(f"NET={NET}")[1] == WHOLE
    assert find("NET=192.168.57.0/24", check=False)[0].returncode == 2
    # Another machine in the place of node4: its key is not the one that is known.
    lab.ssh(4, "sudo rm /etc/ssh/ssh_host_*; sudo ssh-keygen -A; sudo systemctl restart ssh")
    changed = [*WHOLE[:3], "#pc114 ansible_host=192.168.56.114"]
    done, lines = find(f"NET={NET}", "WRITE=1")
    assert lines == changed and "its host key is unknown" in done.stdout.partition("#pc114")[2]
    kept = file.read_text()
    assert re.findall(r"^#?\w+ \S+", kept, re.MULTILINE) == changed
    assert find("NET=192.168.56.0/25", "WRITE=1")[1] == changed[3:]
    assert file.read_text() == kept
