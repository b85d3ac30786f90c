"""How the control side copes with 256 hosts: one machine of the lab under 256 addresses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
NAME = f"bench-{os.getpid()}"
HOSTS = 256
NODE = "192.168.56.111"
FIRST, NETWORK = "10.77.1.0", "10.77.0.0/16"  # known in the lab's own namespaces only
LISTEN = (
    f"for i in $(seq 0 {HOSTS - 1}); do sudo ip address add 10.77.1.$i/32 dev lo; done;"
    # 256 machines have 256 servers, each with its own limit.
    " echo 'MaxStartups 1000' | sudo tee /etc/ssh/sshd_config.d/bench.conf >/dev/null;"
    " sudo systemctl restart ssh"
)
KNOW = (
    f"ip route add {NETWORK} via {NODE};"
    f" key=$(ssh-keygen -F {NODE} | grep -v '^#' | grep ed25519 | cut -d' ' -f2-);"
    f" for i in $(seq 0 {HOSTS - 1}); do echo 10.77.1.$i $key; done >> ~/.ssh/known_hosts;"
)


def lab(verb, *words):
    argv = [sys.executable, "-m", "lab", verb, "--name", NAME, *words]
    process = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")
def test_256_hosts(figure):
    try:
        lab("up", "--nodes", "1", "--no-bundle")
        lab("ssh", "1", "--", LISTEN)
        script = f"{sys.executable} bench/many_hosts.py {HOSTS} {FIRST} tandem"
        printed = lab("exec", "--", "sh", "-c", KNOW + script)
        figures = json.loads(printed.splitlines()[-1])
    finally:
        lab("down")
    assert figures["connect"] > 0 and figures["start"] > 0
    figure(f"connecting to {HOSTS} hosts", figures["connect"], "s", "10 with starting")
    figure(f"starting a guard's stand-in on {HOSTS} hosts", figures["start"], "s")
    figure(f"control side of an idle run, {HOSTS} hosts", figures["idle"], "% of a core", "5")
