"""All of site.yml on each Debian that is supported, twice: the second run changes nothing."""

import pytest

from tests.lab.knock import answering
from tests.lab.site_plays import (
    changed_tasks,
    changes,
    draw_digits,
    gather_bundle,
    play,
    write_inventory,
)

# By release: the stack that its own Python takes, on the CPU, and that Python.
RELEASES = {"bullseye": ("cu102", "3.9"), "bookworm": ("cpu", "3.11"), "trixie": ("cpu", "3.13")}
ADDRESS = "192.168.56.111"
# Listens where a run does, and goes on after this program.
SERVER = (
    "import os, socket; one = socket.create_server((str(), 29500)); os.fork() and os._exit(0); "
    "os.setsid(); one.accept()"
)


@pytest.fixture(params=RELEASES, scope="module")
def machine(request, start_lab, tmp_path_factory):
    """(lab of one machine, words of ansible-playbook) after a first site.yml."""
    stack, python = RELEASES[request.param]
    gather_bundle(stack, python)
    draw_digits()
    lab = start_lab(request.param, "--nodes", "1", "--release", request.param, "--no-bundle")
    folder = tmp_path_factory.mktemp(request.param)
    inventory = write_inventory(folder, {"node1": f"ansible_host={ADDRESS}"})
    words = ["--inventory", inventory, "-e", f"stack={stack}"]
    play(lab, "site.yml", *words)
    yield lab, words
    lab("down")  # the next one has another lab


def test_a_second_run_changes_nothing(machine):
    lab, words = machine
    again = play(lab, "site.yml", *words)
    assert changes(again) == {"node1": 0}, changed_tasks(again)


def test_verify_is_content_and_check_finds_nothing(machine):
    lab, words = machine
    play(lab, "ansible/playbooks/verify.yml", *words)
    argv = ["python", "ansible/check.py", *words]
    done = lab.control(*argv, check=False)
    assert done.stdout.startswith("make check found no problems.\n"), done.stdout


def test_strangers_reach_ssh_alone_and_torch_computes(machine):
    lab, _ = machine
    lab.ssh(1, f"python3 -c '{SERVER}' >/dev/null 2>&1 </dev/null")
    assert "29500" in lab.ssh(1, "ss --no-header --listening --tcp --numeric")
    assert answering(lab, "stranger", ADDRESS, [22, 29500], []) == ["tcp 22"]
    assert lab.ssh(1, "sudo nft list tables").count("inet tandem")
    line = '/opt/tandem/env/bin/python -c "import torch; print(torch.ones(3).sum().item())"'
    assert lab.ssh(1, line) == "3.0\n"
