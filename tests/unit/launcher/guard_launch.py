"""Stands in for torch.distributed.launch: starts workers as it does, returns 1 if one failed.

Usage: guard_launch.py NUMBER SCRIPT [WORD...]. Each worker runs the Python SCRIPT. With DEAF set
it waits until all have ended, as launch may for 30 s; else it leaves after the first failure.
"""

import os
import subprocess
import sys
import time

number, script = int(sys.argv[1]), sys.argv[2]
workers = []
for rank in range(number):
    environment = dict(os.environ, LOCAL_RANK=str(rank), RANK=str(rank))
    command = [os.environ["PYTHON_EXEC"], "-u", "-c", script, *sys.argv[3:]]
    workers.append(subprocess.Popen(command, env=environment, start_new_session=True))
while True:
    codes = [worker.poll() for worker in workers]
    if all(code is not None for code in codes):
        sys.exit(int(any(codes)))
    if any(codes) and "DEAF" not in os.environ:
        sys.exit(1)
    time.sleep(0.02)
