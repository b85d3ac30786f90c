"""Settings that all tests share."""

import os

# One thread a process: test machines have few cores, and thread counts change the bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
