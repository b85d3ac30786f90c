#!/usr/bin/env python3
"""Stands in for an environment's Python, so that whole runs need no torch: as `-m
torch.distributed.launch` it starts this node's workers as launch does; as `-m trainer` it does what
the file $TANDEM_TEST_SCRIPT says; otherwise it is Python.
"""

import os
import runpy
import subprocess
import sys
import time

arguments = sys.argv[1:]


def launch():
    options = dict(
        word[2:].split("=", 1) for word in arguments[2:] if word.startswith("--") and "=" in word
    )
    program = arguments[arguments.index("-m", 1) :]
    local, nodes = int(options["nproc_per_node"]), int(options["nnodes"])
    workers = []
    for index in range(local):
        rank = int(options["node_rank"]) * local + index
        environment = dict(
            os.environ, RANK=str(rank), LOCAL_RANK=str(index), WORLD_SIZE=str(nodes * local)
        )
        environment.update(MASTER_ADDR=options["master_addr"], MASTER_PORT=options["master_port"])
        command = [os.environ["PYTHON_EXEC"], *program]
        workers.append(subprocess.Popen(command, env=environment, start_new_session=True))
    while True:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            sys.exit(1)
        if all(code == 0 for code in codes):
            sys.exit(0)
        time.sleep(0.02)


if arguments[:2] == ["-m", "torch.distributed.launch"]:
    launch()
elif arguments[:2] == ["-m", "trainer"]:
    sys.argv = arguments[1:]
    runpy.run_path(os.environ["TANDEM_TEST_SCRIPT"], run_name="__main__")
else:
    python = os.environ["TANDEM_TEST_PYTHON"]
    os.execv(python, [python, *arguments])
