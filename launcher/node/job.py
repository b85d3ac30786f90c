"""How torch.distributed.launch is started on a node, wherever that is: by a guard or by Slurm."""

from launcher.node.machine import PATH

# Older agents check on their workers every 5 s.
MONITOR_INTERVAL = 0.1


def launch(nodes, node_rank, processes, master_addr, master_port, name):
    """What follows the name of the Python. `name` is part of the prefix of the store's keys, so a
    process of an earlier attempt that wakes up late finds nothing of its own there."""
    return [
        *("-m", "torch.distributed.launch"),
        *("--nnodes={}".format(nodes), "--node_rank={}".format(node_rank)),
        "--nproc_per_node={}".format(processes),
        *("--master_addr={}".format(master_addr), "--master_port={}".format(master_port)),
        *("--rdzv_id={}".format(name), "--monitor_interval={}".format(MONITOR_INTERVAL)),
    ]


def environment(card, threads, cuda_home, path=PATH):
    """What the network libraries must know, since they guess the wrong card where there is docker0
    or a VPN; and where the CUDA toolkit is, for what is compiled during a run.

    Never LD_LIBRARY_PATH: torch finds its libraries by itself, and would find others with it.
    """
    env = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "NCCL_IB_DISABLE": "1"}
    if cuda_home:
        env["CUDA_HOME"] = cuda_home
        env["PATH"] = "{}/bin:{}".format(cuda_home, path)
    if card:
        env["GLOO_SOCKET_IFNAME"] = card
        env["NCCL_SOCKET_IFNAME"] = "=" + card
    return env
