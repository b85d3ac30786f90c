#!/usr/bin/env python3
"""Times the sum of one buffer over all machines: allreduce.py RANK WORLD MASTER PORT BYTES RESULT.

Prints nothing; writes {"seconds": median of three, after one warm-up} as JSON.
GLOO_SOCKET_IFNAME names the network card. The store has no password: run this behind the firewall.
"""

import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    rank, world, master, port, size, result = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}:{port}",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=120),
    )
    buffer = torch.zeros(int(size) // 4)
    seconds = []
    for _ in range(4):
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(buffer)
        seconds.append(time.monotonic() - began)
    Path(result).write_text(json.dumps({"seconds": statistics.median(seconds[1:])}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
