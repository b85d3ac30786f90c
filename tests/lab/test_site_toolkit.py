"""CUDA toolkit, cuDNN and NCCL from stand-ins in NVIDIA's layout: installed, damaged, removed."""

import json
import subprocess
import time
from typing import ClassVar

import pytest
import yaml

from tests.lab.conftest import CHECKOUT
from tests.lab.disks import changed_files
from tests.lab.site_plays import changes, failures, play, said, write_inventory
from tests.lab.standins import standin_toolkit

NODES = (1, 2)
LAST = NODES[-1]
HOSTS = {f"node{n}": f"ansible_host=192.168.56.{110 + n}" for n in NODES}
NONE = dict.fromkeys(HOSTS, 0)
HOME = "/usr/local/cuda-10.2"
# What preflight would leave: the machine's facts and the stack, which is named.
PLAY = """
- name: Roles under test
  hosts: cluster
  gather_facts: false
  become: true
  pre_tasks:
    - name: Collect
      machine_facts: {address: "{{ ansible_host }}"}
      become: false
      register: collected
    - name: Keep
      ansible.builtin.set_fact:
        preflight_facts: "{{ collected.facts | combine({'host': inventory_hostname}) }}"
  roles: [cuda, cudnn, nccl]
"""
VERIFY = """
    - ansible.builtin.include_role: {name: cuda, tasks_from: verify}
"""
UNINSTALL = """
- name: Take it away again
  hosts: cluster
  gather_facts: false
  become: true
  tasks:
    - name: Roles under test
      ansible.builtin.include_role: {name: "{{ item }}", tasks_from: uninstall}
      loop: [nccl, cudnn, cuda]
"""


class Toolkit:
    """Two machines, stand-ins in a bundle of their own, and the play that installs them."""

    asked: ClassVar = {}

    def __init__(self, lab, folder):
        self.lab, self.folder = lab, folder
        (folder / "play.yml").write_text(PLAY)
        (folder / "verify.yml").write_text(
            PLAY.replace("  roles: [cuda, cudnn, nccl]\n", "  tasks:") + VERIFY
        )
        (folder / "uninstall.yml").write_text(UNINSTALL)
        self.bundle = folder / "bundle"
        self.settings()
        self.words = ["--inventory", write_inventory(folder, HOSTS), "-e", f"@{folder}/vars.json"]

    def settings(self):
        """Stand-ins anew, and the variables that name them."""
        table = yaml.safe_load((CHECKOUT / "ansible/stacks.yml").read_text())["stacks"]
        if not self.bundle.exists():
            self.standins = standin_toolkit.write_all(self.bundle)
        variables = {
            "toolkit": True, "apex": False, "apex_extensions": "auto", "cuda_home": "",
            "cuda_table": {**table, **self.standins},
            "cuda_bundle": str(self.bundle), "apex_bundle": str(self.bundle),
            "cuda_packages": [], "preflight_stack": {**table["rows"]["cu102"], "name": "cu102"},
            **self.asked,
        }  # fmt: skip
        (self.folder / "vars.json").write_text(json.dumps(variables))

    def play(self, *words, **options):
        return play(self.lab, str(self.folder / "play.yml"), *self.words, *words, **options)

    def verify(self, **options):
        return play(self.lab, str(self.folder / "verify.yml"), *self.words, **options)

    def uninstall(self):
        return play(self.lab, str(self.folder / "uninstall.yml"), *self.words)

    def file(self, name):
        return self.bundle / "installers/toolkit-10.2" / name


@pytest.fixture(scope="module")
def toolkit(start_lab, tmp_path_factory):
    return Toolkit(
        start_lab("toolkit", "--nodes", "2", "--no-bundle"), tmp_path_factory.mktemp("toolkit")
    )


@pytest.fixture
def clean(toolkit):
    """Both machines without a toolkit, and how their disks are then."""
    toolkit.uninstall()
    return {node: changed_files(toolkit.lab, node) for node in NODES}


def test_installed_once_and_taken_away_without_a_trace(toolkit, clean):
    lab = toolkit.lab
    lab.ssh(LAST, "sudo ln -sfn /usr/local/share /usr/local/cuda")  # somebody's own
    before = {**clean, LAST: changed_files(lab, LAST)}
    predicted = toolkit.play("--check")
    assert "CUDA 10.2.89 would be installed" in said(predicted)
    assert changed_files(lab, LAST) == before[LAST]
    toolkit.play()
    assert changes(toolkit.play()) == NONE
    assert changes(toolkit.play("--check")) == NONE
    for node in NODES:
        shell = "bash -lc 'nvcc --version; echo $CUDA_HOME [$LD_LIBRARY_PATH]'"
        assert "release 10.2" in lab.ssh(node, shell)
        assert lab.ssh(node, shell).endswith("/usr/local/cuda []\n")
        listed = lab.ssh(node, f"cd {HOME} && ls include lib64 && readlink -f /usr/local/cuda")
        assert {"cudnn.h", "nccl.h", "libcudnn.so", "libnccl.so.2.12.7"} <= set(listed.split())
        assert listed.endswith(f"{HOME}\n")
        assert lab.ssh(node, f"cat {HOME}/pkgconfig/cuda.pc") == f"cudaroot={HOME}\n"
        assert lab.ssh(node, f"readlink {HOME}/absolute-link") == f"{HOME}/include\n"
        assert "cudnn" not in lab.ssh(node, "/sbin/ldconfig -p")
        left = lab.ssh(node, "ls -A /tmp /var/lib/tandem /usr/local")
        assert "cuda-installer.log" not in left
        assert "toolkit-files" not in left and ".tandem-cuda" not in left
    toolkit.uninstall()
    for node in NODES:
        assert changed_files(lab, node) == before[node]
    assert changes(toolkit.uninstall()) == NONE
    lab.ssh(LAST, "sudo rm /usr/local/cuda")


def test_make_verify_sees_what_is_missing(toolkit, clean):
    toolkit.play()
    assert changes(toolkit.verify()) == NONE
    toolkit.lab.ssh(LAST, f"sudo rm {HOME}/lib64/libnccl.so")
    done = toolkit.verify(check=False)
    assert failures(done) == {f"node{LAST}"}
    assert "is not a complete CUDA 10.2 (nccl is missing)" in said(done)
    toolkit.play()  # and site.yml puts it back
    assert changes(toolkit.verify()) == NONE


def test_dry_provision_of_machines_that_answer(toolkit):
    inventory = toolkit.words[1]
    done = toolkit.lab.control("python", "ansible/dry_provision.py", "--inventory", inventory)
    assert said(done).count("no machine that answered has an NVIDIA GPU") == len(HOSTS)
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_a_full_disk_leaves_the_machine_as_it_was(toolkit, clean):
    lab, path = toolkit.lab, toolkit.file("standin-cuda_10.2.89_linux.run")
    small = path.read_bytes()
    standin_toolkit.runfile(path, big=24 << 20)
    toolkit.standins["toolkits"]["10.2"][0]["sha256"] = None
    toolkit.settings()
    (path.parent / "MANIFEST.sha256").unlink(missing_ok=True)
    lab.ssh(1, "sudo mount -t tmpfs -o size=16m tmpfs /usr/local")
    try:
        done = toolkit.play("--limit", "node1", check=False)
        assert failures(done) == {"node1"}
        assert "was not installed on node1, which is as it was" in said(done)
        assert "No space left" in done.stdout or "no space left" in done.stdout
        assert lab.ssh(1, "ls -A /usr/local") == ""
        lab.ssh(1, "sudo mount -o remount,size=160m /usr/local")
        toolkit.play("--limit", "node1")
        assert "release 10.2" in lab.ssh(1, f"{HOME}/bin/nvcc --version")
        toolkit.uninstall()
    finally:
        lab.ssh(1, "sudo umount /usr/local")
        path.write_bytes(small)
        toolkit.standins["toolkits"]["10.2"][0]["sha256"] = standin_toolkit.entry("", "", path)[
            "sha256"
        ]
        toolkit.settings()
        (path.parent / "MANIFEST.sha256").unlink(missing_ok=True)
    assert changed_files(lab, 1) == clean[1]


def test_a_kill_in_the_middle_is_finished_by_the_next_run(toolkit, clean):
    lab = toolkit.lab
    lab.ssh(1, "sudo mkdir /run/standin-waits")
    words = [str(toolkit.folder / "play.yml"), *toolkit.words, "--limit", "node1"]
    running = subprocess.Popen(
        lab.argv("exec", "--", "ansible-playbook", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=lab.checkout,
    )
    deadline = time.monotonic() + 300
    while lab.ssh(1, "ls /run/standin-waits") == "":
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.2)
    lab("kill", "1")  # the power goes while NVIDIA's installer runs
    running.kill()
    running.wait()
    lab("mend", "1")
    assert lab.ssh(1, "ls -A /usr/local | grep tandem") == ".tandem-cuda-10.2\n" * 1 + (
        ".tandem-cuda-10.2.tmp\n"
    )
    toolkit.play("--limit", "node1")
    assert "release 10.2" in lab.ssh(1, f"{HOME}/bin/nvcc --version")
    assert lab.ssh(1, "ls -A /usr/local | grep -c tandem || true") == "0\n"
    toolkit.uninstall()
    assert changed_files(lab, 1) == clean[1]


def test_what_others_installed_is_left_alone(toolkit, clean):
    toolkit.lab.ssh(LAST, f"sudo mkdir {HOME}; sudo touch {HOME}/theirs")
    done = toolkit.play(check=False)
    assert failures(done) == {f"node{LAST}"}
    assert f"{HOME} on node{LAST} was not installed by Tandem: move it away" in said(done)
    assert toolkit.lab.ssh(LAST, f"ls {HOME}; ls /usr/local | grep -c cuda") == "theirs\n1\n"
    toolkit.uninstall()
    assert toolkit.lab.ssh(LAST, f"ls {HOME} && sudo rm -r {HOME}") == "theirs\n"
