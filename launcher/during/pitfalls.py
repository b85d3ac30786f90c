"""Problems of people who set up such clusters by hand: a pattern, its meaning and the remedy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from contract.errors import BAD_INPUT, DATA_LOST, DIVERGED
from tools import verbs

if TYPE_CHECKING:  # it imports this file
    from launcher.during.cause import Failure


class Pitfall(NamedTuple):
    pattern: str
    meaning: str
    remedy: str


PITFALLS = (
    Pitfall(
        r"no kernel image is available|not compatible with the current PyTorch installation",
        "this torch has no code for this GPU",
        "choose a stack that supports it (ansible/stacks.yml) and run `make provision`",
    ),
    Pitfall(
        r"Driver/library version mismatch",
        "the NVIDIA driver was upgraded while its old kernel module is still loaded",
        "reboot the machine; `make provision` holds the driver's version",
    ),
    Pitfall(
        r"CUDA driver version is insufficient|driver on your system is too old",
        "the NVIDIA driver is older than this torch's CUDA needs",
        "run `make provision`, or choose an older stack",
    ),
    Pitfall(
        r"CUDA out of memory|OutOfMemoryError|_STATUS_ALLOC_FAILED|"
        r"Unable to find a valid cuDNN algorithm|unable to find an engine",
        "the batch does not fit into the GPU's memory",
        "give a smaller BATCH, or ARGS='--accumulate 2', which keeps the global batch",
    ),
    Pitfall(
        r"one of the variables needed for gradient computation has been modified by an inplace",
        "the model ran forward twice before one backward, and DDP copied its buffers in between",
        "make it one forward call, or leave --broadcast_buffers off",
    ),
    Pitfall(
        r"Expected to have finished reduction in the prior iteration|marked (as )?ready twice",
        "some parameters took no part in the loss",
        "give ARGS='--find_unused_parameters'",
    ),
    Pitfall(
        r"NCCL.*invalid usage|ncclInvalidUsage|Duplicate GPU detected",
        "two ranks use the same GPU, or a tensor lies on another GPU than its rank's",
        "check `gpus` of this machine in the inventory",
    ),
    Pitfall(
        r"NCCL.*unhandled (system|cuda) error|nccl(SystemError|UnhandledCudaError|InternalError)",
        "NCCL could not use the network, the GPU or shared memory",
        "read the NCCL WARN lines of that rank's log; /dev/shm and `interface` "
        "in the inventory are the usual causes",
    ),
    Pitfall(
        r"[Ww]atchdog caught collective operation timeout",
        "its peers did not reach the same step within --timeout, and NCCL ended it",
        "read what the other ranks printed last; ARGS='--timeout 600' waits longer",
    ),
    Pitfall(
        r"ncclRemoteError|NCCL communicator was aborted",
        "NCCL lost the connection to a peer",
        "read what the other ranks printed last, and check the network between the machines",
    ),
    Pitfall(
        r"Expected more than 1 value per channel",
        "a rank's batch has one image, and batch normalisation needs two",
        "give a larger BATCH, or ARGS='--sync_bn'",
    ),
    Pitfall(
        r"(Missing|Unexpected) key\(s\) in state_dict.*module\.",
        "the weights were saved with DistributedDataParallel's prefix `module.`",
        "load them with --weights, which takes both spellings",
    ),
    Pitfall(
        r"EADDRINUSE|Address already in use|errno: ?98\b",
        "another process took the port of this run",
        "start the run again: a free port is chosen",
    ),
    Pitfall(
        r"Unable to find (address|interface)|ifa == nullptr|"
        r"[Ii]nterface.*(not found|no such)|No such device",
        "the network card that the plan names does not exist on this machine",
        "correct or remove `interface` of this machine in the inventory",
    ),
    Pitfall(
        r"No space left on device|Errno 28|ENOSPC",
        "its disk is full",
        "make room where node_dir lies (old runs: <node_dir>/runs), then continue with "
        "`make train RESUME=latest`",
    ),
    Pitfall(
        r"systemd-oomd ended",
        "systemd-oomd ended the run there, since memory was short",
        "close other programs there, or give a smaller BATCH or ARGS='--workers 2'; `make "
        "provision` sets that runs are spared (docs/launcher.md)",
    ),
    Pitfall(
        r"unrecognized arguments: --local[-_]rank",
        "the program does not know the option by which launch gives the local rank",
        "read LOCAL_RANK from the environment instead",
    ),
    Pitfall(
        r"Permission denied|Errno 13",
        "the run user may not use a file",
        "give that path to the run user, or choose another data folder",
    ),
    Pitfall(
        r"libcud\w+\.so[.\d]*: cannot open|libnccl\S*: cannot open|undefined symbol",
        "a CUDA library is missing or of another version than torch was built for",
        "run `make provision`; remove LD_LIBRARY_PATH from run_env in the inventory",
    ),
    Pitfall(
        r"torchvision::nms does not exist|version `GLIBC",
        "torch, torchvision and the system are not compatible with each other",
        "run `make provision`: it installs versions that do",
    ),
    Pitfall(
        r"No module named '?apex",
        "apex is not in the environment (PyPI's `apex` is another project)",
        "use precision O1 without apex, or run `make provision` with a stack that has it",
    ),
    Pitfall(
        r"No module named",
        "a Python package is missing in the node's environment",
        "run `make provision`; what your own model needs beside that, install with the pip of "
        "that environment",
    ),
    Pitfall(
        r"DataLoader worker .* (killed by signal: Bus error|is killed by signal)",
        "a loader process was killed, mostly for lack of shared memory",
        "give ARGS='--workers 0', or more /dev/shm",
    ),
)

READ_BELOW = "read its last lines below"  # where nothing better is known

SIGNALS = {
    "SIGKILL": (
        "it was killed, by a person or by the kernel when memory ran out",
        "look at `journalctl -k` of that machine for `Out of memory`",
    ),
    "SIGSEGV": (
        "it crashed inside a library",
        "run again with ARGS='--workers 0'; if it happens again, check the machine's memory",
    ),
    "SIGBUS": (
        "it ran out of shared memory, or a file it had mapped vanished",
        "check /dev/shm and the data's disk",
    ),
    "SIGTERM": ("something on that machine ended it", "find out who did"),
}


def explain(failure: Failure) -> tuple[str, str]:
    """One sentence about what happened, and one about what to do; its commands keep the run's list
    of machines, for the report prints them, too."""
    meaning, remedy = _explain(failure)
    return meaning, verbs.keeping(remedy)


def _explain(failure: Failure) -> tuple[str, str]:
    text = "\n".join(filter(None, [failure.exception, failure.message, *failure.last_lines]))
    for pitfall in PITFALLS:
        if re.search(pitfall.pattern, text):
            return f"{_who(failure)}: {pitfall.meaning}", pitfall.remedy
    if failure.signal in SIGNALS:
        meaning, remedy = SIGNALS[failure.signal]
        return f"{_who(failure)} ended by {failure.signal}: {meaning}", remedy
    if failure.signal:
        return f"{_who(failure)} ended by {failure.signal}", READ_BELOW
    if failure.kind == "paused":
        return (
            f"{failure.message}, so {failure.host} heard nothing from it and stopped its part",
            "do not stop or suspend the control machine during a run (with DETACH=1 it "
            "needs no terminal); `make train RESUME=latest` continues the run",
        )
    if failure.kind in ("gone", "guard", "launch"):
        return _of_node(failure, text)
    # torch may add warnings as it exits
    own = [line for line in failure.last_lines if line.startswith("trainer: ")]
    if failure.exit_code == DIVERGED:
        said = own[-1].partition(": ")[2] if own else "the loss is not finite any more"
        return said, (
            "start a new run with what is suggested; such options are given as ARGS='--lr 0.01'"
        )
    if failure.exit_code == DATA_LOST and own:
        return f"{_who(failure)}: {own[-1]}", (
            "when it is well again, `make train RESUME=latest` goes on; with MAX_RESTARTS=3 a run "
            "starts again by itself, without a machine that cannot read its images"
        )
    if failure.exit_code == BAD_INPUT and failure.last_lines:
        said = (own or failure.last_lines)[-1]
        return f"{_who(failure)}: {said}", "correct it and start again"
    said = f": {failure.exception}" if failure.exception else ""
    return (
        f"{_who(failure)} ended with exit code {failure.exit_code}{said}",
        READ_BELOW,
    )


def _of_node(failure: Failure, text: str) -> tuple[str, str]:
    """What happened to a machine, its guard or its launch."""
    killed = re.search(r"Signal \d+ \((SIG\w{3,7})\) received by PID", text[-4000:])
    if failure.kind == "launch" and killed:
        meaning, remedy = SIGNALS.get(killed[1], ("", READ_BELOW))
        said = f": {meaning}" if meaning else ""
        ended = f"{failure.host}: a process of torch.distributed.launch was ended by {killed[1]}"
        return f"{ended} {failure.message or ''}".rstrip() + said, remedy
    said = f": {failure.message}" if failure.message else ""
    remedies = {
        "gone": "check that it is switched on and plugged in; MAX_RESTARTS=3 continues without it",
        "guard": "find out who killed or changed it; MAX_RESTARTS=3 starts the run again",
        "launch": "read nodes/<host>/launch.log of the run",
    }
    what = {
        "gone": "is gone",
        "guard": "lost its guard",
        "launch": "could not run torch.distributed.launch",
    }
    return f"{failure.host} {what[failure.kind]}{said}", remedies[failure.kind]


def _who(failure: Failure) -> str:
    return failure.host if failure.rank is None else f"{failure.host}, rank {failure.rank}"
