"""Settings that all tests share."""

import os
import signal

from contract import interrupts

# One thread a process: test machines have few cores, and thread counts change the bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ranks of these tests share a machine, and NCCL refuses two on one GPU: only tests/gpu is about
# GPUs, and takes them by CUDA_VISIBLE_DEVICES as they were.
os.environ.setdefault("TANDEM_TEST_CARDS", os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# The programs, which tests import, let Ctrl-C end them until their main begins: not this process.
interrupts.heard()

# A shell's `&` in a script starts children with SIGINT ignored; they and theirs would keep it so,
# and tests that interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
