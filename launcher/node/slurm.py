"""A run's part in a Slurm job. On the first node `python -m launcher.node.slurm` starts
`... slurm node` on each node by srun, and that becomes the launch of a run started by ssh.

What is to run is in TANDEM_JOB, as JSON (launcher/slurm.py): its run_env may hold passwords, and
other users may read a command line.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

from contract.card import route
from launcher.node import job as jobs


def main(argv):
    if argv:
        become(json.loads(os.environ["TANDEM_JOB"]), os.environ)
    nodes = os.environ["SLURM_JOB_NODELIST"]
    hosts = subprocess.check_output(["scontrol", "show", "hostnames", nodes]).decode().split()
    os.environ.update(meeting(hosts))
    ours = [sys.executable, "-m", "launcher.node.slurm", "node"]
    # One node's failure ends the others; Slurm's own control groups leave no orphan.
    os.execvp("srun", ["srun", "--kill-on-bad-exit=1", *ours])  # noqa: S606 (without a shell)


def meeting(hosts):
    """Addresses of the first node and of one that it reaches, as variables: its own name may mean
    127.0.1.1 there; the second node's does not."""
    peer = address_of(hosts[1]) if len(hosts) > 1 else "127.0.0.1"
    master = route(peer)["source"] if len(hosts) > 1 else peer
    return {"TANDEM_PEER": peer, "TANDEM_MASTER": master or peer}


def address_of(host):
    every = [found[4][0] for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    others = [one for one in every if not one.startswith(("127.", "::ffff:127.")) and one != "::1"]
    if not others:
        sys.exit("tandem: {} means {} here, by which no other node is reached".format(host, every))
    return others[0]


def become(job, slurm):
    """The launch on this node, with its environment; InfiniBand stays allowed, and PATH begins with
    the job's: a cluster with a queue may have both."""
    node, count = slurm["SLURM_NODEID"], int(slurm.get("SLURM_GPUS_ON_NODE", 1))
    other = slurm["TANDEM_PEER" if node == "0" else "TANDEM_MASTER"]
    threads = max(1, int(slurm["SLURM_CPUS_ON_NODE"]) // count)
    known = jobs.environment(
        route(other)["interface"], threads, job["cuda_home"], slurm.get("PATH", jobs.PATH)
    )
    del known["NCCL_IB_DISABLE"]
    known["TANDEM_NODE"] = slurm["SLURMD_NODENAME"]
    known["TANDEM_ATTEMPT"] = str(int(slurm.get("SLURM_RESTART_COUNT", 0)) + 1)
    number = int(slurm["SLURM_JOB_ID"])
    launch = jobs.launch(
        slurm["SLURM_NNODES"],
        node,
        count,
        slurm["TANDEM_MASTER"],
        job["first_port"] + number % 1000,
        "{}-{}".format(job["run"], number),
    )
    output = str(pathlib.Path.cwd() / "runs" / job["run"])
    given = json.dumps({"output": output, **job["given"]})
    argv = [job["python"], *launch, "-m", "trainer", "--config", given]
    kept = {name: text for name, text in slurm.items() if name != "TANDEM_JOB"}
    os.execvpe(argv[0], argv, {**kept, **known, **job["env"]})  # noqa: S606 (without a shell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
