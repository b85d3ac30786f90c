"""Errors of people who set up such clusters by hand: a pattern of what a process prints, its
meaning and the remedy; and what signals mean. failures.py makes kinds of failure of them."""

from __future__ import annotations

from typing import NamedTuple


class KnownError(NamedTuple):
    """`script` is the remedy in a script of the user's, where it is another than the trainer's."""

    pattern: str
    meaning: str
    remedy: str
    script: str | None = None


KNOWN_ERRORS = (
    KnownError(
        r"no kernel image is available|not compatible with the current PyTorch installation",
        "this torch has no code for this GPU",
        "choose a stack that supports it (ansible/stacks.yml) and run `make provision`",
    ),
    KnownError(
        r"Driver/library version mismatch",
        "the NVIDIA driver was upgraded while its old kernel module is still loaded",
        "reboot the machine; `make provision` holds the driver's version",
    ),
    KnownError(
        r"CUDA driver version is insufficient|driver on your system is too old",
        "the NVIDIA driver is older than this torch's CUDA needs",
        "run `make provision`, or choose an older stack",
    ),
    KnownError(
        r"CUDA out of memory|OutOfMemoryError|_STATUS_ALLOC_FAILED|"
        r"Unable to find a valid cuDNN algorithm|unable to find an engine",
        "the batch does not fit into the GPU's memory",
        "give a smaller BATCH, or ARGS='--accumulate 2', which keeps the global batch",
        "give the script a smaller batch",
    ),
    KnownError(
        r"one of the variables needed for gradient computation has been modified by an inplace",
        "the model ran forward twice before one backward, and DDP copied its buffers in between",
        "make it one forward call, or leave --broadcast_buffers off",
        "make it one forward call, or give DistributedDataParallel broadcast_buffers=False",
    ),
    KnownError(
        r"Expected to have finished reduction in the prior iteration|marked (as )?ready twice",
        "some parameters took no part in the loss",
        "give ARGS='--find_unused_parameters'",
        "give DistributedDataParallel find_unused_parameters=True",
    ),
    KnownError(
        r"NCCL.*invalid usage|ncclInvalidUsage|Duplicate GPU detected",
        "two ranks use the same GPU, or a tensor lies on another GPU than its rank's",
        "check `gpus` of this machine in the inventory",
        "take the GPU that LOCAL_RANK names: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
    ),
    KnownError(
        r"NCCL.*unhandled (system|cuda) error|nccl(SystemError|UnhandledCudaError|InternalError)",
        "NCCL could not use the network, the GPU or shared memory",
        "read the NCCL WARN lines of that rank's log; /dev/shm and `interface` "
        "in the inventory are the usual causes",
    ),
    KnownError(
        r"[Ww]atchdog caught collective operation timeout",
        "its peers did not reach the same step within --timeout, and NCCL ended it",
        "read what the other ranks printed last; ARGS='--timeout 600' waits longer",
        "read what the other ranks printed last; init_process_group(timeout=...) waits longer",
    ),
    KnownError(
        r"ncclRemoteError|NCCL communicator was aborted",
        "NCCL lost the connection to a peer",
        "read what the other ranks printed last, and check the network between the machines",
    ),
    KnownError(
        r"Expected more than 1 value per channel",
        "a rank's batch has one image, and batch normalisation needs two",
        "give a larger BATCH, or ARGS='--sync_bn'",
        "give the script a larger batch, or its DataLoader drop_last=True",
    ),
    KnownError(
        r"(Missing|Unexpected) key\(s\) in state_dict.*module\.",
        "the weights were saved with DistributedDataParallel's prefix `module.`",
        "load them with --weights, which takes both spellings",
        "save model.module.state_dict(), or take the prefix away as they are loaded",
    ),
    KnownError(
        r"EADDRINUSE|Address already in use|errno: ?98\b",
        "another process took the port of this run",
        "start the run again: a free port is chosen",
        "let the script take MASTER_PORT from its environment, which is free, and no fixed port",
    ),
    KnownError(
        r"Unable to find (address|interface)|ifa == nullptr|"
        r"[Ii]nterface.*(not found|no such)|No such device",
        "the network card that the plan names does not exist on this machine",
        "correct or remove `interface` of this machine in the inventory",
    ),
    KnownError(
        r"systemd-oomd ended",
        "systemd-oomd ended the run there, since memory was short",
        "close other programs there, or give a smaller BATCH or ARGS='--workers 2'; `make "
        "provision` sets that runs are spared (docs/launcher.md)",
        "close other programs there, or give the script a smaller batch or fewer loader processes",
    ),
    KnownError(
        r"libcud\w+\.so[.\d]*: cannot open|libnccl\S*: cannot open|undefined symbol",
        "a CUDA library is missing or of another version than torch was built for",
        "run `make provision`; remove LD_LIBRARY_PATH from run_env in the inventory",
    ),
    KnownError(
        r"torchvision::nms does not exist|version `GLIBC",
        "torch, torchvision and the system are not compatible with each other",
        "run `make provision`: it installs versions that do",
    ),
    KnownError(
        r"No module named '?apex",
        "apex is not in the environment (PyPI's `apex` is another project)",
        "use precision O1 without apex, or run `make provision` with a stack that has it",
        "run `make provision` with a stack that has it",
    ),
    KnownError(
        r"No module named",
        "a Python package is missing in the node's environment",
        "run `make provision`; what your own model needs beside that, install with the pip of "
        "that environment",
        "name it in requirements.txt beside the script (docs/own-script.md)",
    ),
    KnownError(
        r"DataLoader worker .* (killed by signal: Bus error|is killed by signal)",
        "a loader process was killed, mostly for lack of shared memory",
        "give ARGS='--workers 0', or more /dev/shm",
        "give its DataLoader num_workers=0, or the machine more /dev/shm",
    ),
    KnownError(
        r"DataLoader worker .* exited unexpectedly|before the current process has finished its boo",
        "a loader process ended by itself",
        "read what it printed in nodes/<host>/rank<k>.log",
        "read what it printed in nodes/<host>/rank<k>.log; where loaders are spawned, all that the "
        "script does has to stand below if __name__ == '__main__':",
    ),
)

# {name: (meaning, remedy)}
SIGNALS = {
    "SIGKILL": (
        "it was killed, by a person or by the kernel when memory ran out",
        "look at `journalctl -k` of that machine for `Out of memory`",
    ),
    "SIGSEGV": (
        "it crashed inside a library",
        "run again without loader processes; if it happens again, check the machine's memory",
    ),
    "SIGBUS": (
        "it ran out of shared memory, or a file it had mapped vanished",
        "check /dev/shm and the data's disk",
    ),
    "SIGTERM": ("something on that machine ended it", "find out who did"),
}
