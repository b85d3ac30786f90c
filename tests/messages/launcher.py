"""What the launcher says: of failures, of machines before a run, of ssh, at a run's end."""

import socket
from dataclasses import replace
from pathlib import Path

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from boundary.frames import Exit, Process
from contract import errors
from contract.options import Config
from launcher.machines import owned, ssh
from launcher.problems import RULES, problem
from launcher.watch import attempts
from launcher.watch.attempts import Outcome
from launcher.watch.failures import Failure, explain_failure, explain_restart
from launcher.watch.known_errors import KNOWN_ERRORS, SIGNAL_MEANINGS
from report.wait_rules import WORDS
from tests.unit.launcher.launcher_values import (
    DATA,
    LISTING,
    VERSIONS,
    facts,
    gpus,
    host,
    needs,
    problems,
)


def worker(**fields):
    return Failure(**{"host": "node1", "source": "worker", "order": 0, "rank": 3, **fields})


def machine(source, **fields):
    return worker(**{"source": source, "rank": None, **fields})


def printed(text):
    return worker(exit_code=1, exception=text)


KILLED = ("  traceback : Signal 9 (SIGKILL) received by PID 8730",)
FAILURES = {
    "disk full": printed("OSError: [Errno 28] No space left on device"),
    "signal": worker(signal="SIGABRT"),
    **{f"worker ended by {name}": worker(signal=name, seconds=12.3) for name in SIGNAL_MEANINGS},
    "launch ended by a signal": machine("launch", signal="SIGKILL", seconds=12.3),
    "a process of launch ended": machine("launch", exit_code=1, seconds=12.3, last_lines=KILLED),
    "by a signal without a row": machine(
        "launch", exit_code=1, last_lines=("Signal 6 (SIGABRT) received by PID 8",)
    ),
    "launch could not run": machine("launch", exit_code=1, last_lines=("no such module",)),
    "busy": machine("busy", message="it is in use by anna@desk: run r"),
    "paused": machine("paused", message="the control node did not run for 40 s"),
    "gone": machine("gone", message="no heartbeat for 15 s"),
    "hung": worker(source="hung", message="no step for 120 s: its process is stopped"),
    "alone": machine(
        "alone",
        message="rank 1 connected to no other rank within 60 s",
        has_exit_codes=False,
    ),
    "left": worker(source="left", message="node2, rank 1", seconds=9.0),
    "left after an exception": worker(source="left", exception="ValueError: x", message="then y"),
    "idle": worker(source="idle", message="has done nothing for 10 min"),
    "last words": worker(exit_code=2, last_line="train.py: error: no --x", has_exit_codes=False),
    "more words": worker(exit_code=1, exception="KeyError: 1", last_line="x", has_exit_codes=False),
    "guard": machine("guard", exit_code=9, message="it was killed after 7 s"),
    "diverged": worker(exit_code=errors.DIVERGED, last_lines=("trainer: the loss is NaN",)),
    "diverged without a word": worker(exit_code=errors.DIVERGED),
    "data lost": worker(exit_code=errors.DATA_LOST, last_lines=("trainer: /d: it is gone",)),
    "bad input": worker(
        exit_code=errors.BAD_INPUT,
        last_lines=("trainer: no such model", "[rank0]:[W1122 ProcessGroupNCCL.cpp:1496] Warning"),
    ),
    "out of memory": worker(exit_code=errors.OUT_OF_MEMORY),
    "exit code": worker(exit_code=9, exception="ValueError: x"),
    "no kernel": printed("RuntimeError: no kernel image is available"),
    "driver mismatch": printed("Driver/library version mismatch"),
    "old driver": printed("CUDA driver version is insufficient for CUDA runtime version"),
    "CUDA memory": printed("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"),
    "forward twice": printed(
        "RuntimeError: one of the variables needed for gradient computation has been modified by "
        "an inplace operation"
    ),
    "no group": printed("ValueError: Default process group has not been initialized"),
    "unused": printed("RuntimeError: Expected to have finished reduction in the prior iteration"),
    "same GPU": printed("NCCL: ncclInvalidUsage"),
    "NCCL": printed("NCCL error: unhandled system error"),
    "watchdog": printed("Watchdog caught collective operation timeout"),
    "watchdog, Gloo's": printed("RuntimeError: Timed out waiting 20000ms for recv operation"),
    "weights only": printed("_pickle.UnpicklingError: Weights only load failed. This file"),
    "card closed": printed("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    "card closed, before": printed("CUDA error: all CUDA-capable devices are busy or unavailable"),
    "peer lost": printed("ncclRemoteError: A call failed"),
    "one image": printed("ValueError: Expected more than 1 value per channel when training"),
    "prefix": printed("Missing key(s) in state_dict: module.conv1.weight"),
    "port": printed("RuntimeError: The server socket has failed to listen: EADDRINUSE"),
    "interface": printed("RuntimeError: Unable to find address for: eno7"),
    "oomd": printed("systemd-oomd ended it"),
    "local rank": printed("error: unrecognized arguments: --local-rank=0"),
    "permission": printed("PermissionError: [Errno 13] Permission denied"),
    "CUDA library": printed("OSError: libcudnn.so.8: cannot open shared object file"),
    "not destroyed": worker(
        signal="SIGABRT", last_lines=("terminate called without an active exception",)
    ),
    "nms": printed("RuntimeError: operator torchvision::nms does not exist"),
    "apex": printed("ModuleNotFoundError: No module named 'apex'"),
    "module": printed("ModuleNotFoundError: No module named 'timm'"),
    "loader": printed("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."),
    "spawned": printed("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly"),
}


def of_failures():
    for code, failure in FAILURES.items():
        message, remedy = explain_failure(failure)
        then = f"exit code {failure.run_exit_code}, another attempt: {failure.restart.name}"
        yield f"failure: {code}", f"{message}: {remedy}\n{then}: {explain_restart(failure, 2)}"
        own = explain_failure(replace(failure, has_exit_codes=False))
        if own != (message, remedy):
            yield f"failure: {code}, in a script", ": ".join(own)
    shown = [explain_failure(failure)[0] for failure in FAILURES.values()]
    for one in KNOWN_ERRORS:
        assert any(one.meaning in text for text in shown), f"no example of {one.pattern}"


def versions(**changes):
    return {"versions": {**VERSIONS, **changes}}


def data(**changes):
    return {"data": {**DATA, **changes}}


NOTE = "Tandem skips these files in train: 40 .avif, 12 in @eaDir"
HELD = [{"pid": 7, "user": "ann", "command": "python x"}]
OTHER = {"pid": 7, "run": "20261120T120000Z-resnet18-4n", "holder": "ann@desk", "seconds": 7500}
# Changes of node2's facts.
MACHINES = {
    "no torch": versions(torch=None, torchvision=None),
    "no digits": data(exists=False, splits={}),
    "no imagenet": data(exists=False, splits={}),
    "no such data": data(exists=False, others=["digits", "mnt"], splits={}),
    "no data set": data(problem="it has no folder train but training.", splits={}),
    "data not read": data(splits={"train": {**LISTING, "note": NOTE}, "val": LISTING}),
    "other data": data(splits={"train": {**LISTING, "images": 3}, "val": LISTING}),
    "not writable": {"writable": False},
    "little room": {"disk_free": 1 << 29},
    "no room": {"disk_free": 0},
    "clock ahead": {"skew": 60.0},
    "clock behind": {"skew": -60.0},
    "no toolkit": {"toolkit": False},
    "no guard's Python": {"guard_python": False},
    "driver upgraded": {"gpus": gpus(0, error="Driver/library version mismatch")},
    "driver fails": {"gpus": gpus(0, error="No devices were found")},
    "GPUs in use": {"gpus": gpus(1, processes=HELD)},
    "in use": {"runs": [OTHER, {**OTHER, "pid": 8}]},
    "other torch": versions(torch="2.14.1"),
    "other CUDA": versions(cuda="12.6"),
    "other NCCL": versions(nccl="2.10"),
    "other processor": {"architecture": "aarch64"},
    "other driver": {"gpus": gpus(1, driver="440.33")},
    "no GPU": {"gpus": gpus(0)},
    "GPU without a driver": {"gpus": gpus(0, driver=None, on_bus=1)},
}
FOLDERS = {"no digits": "digits", "no imagenet": "imagenet", "no such data": "/d/nosuch"}
# Of one machine by itself, for other reasons than its answer.
OF_ONE = {
    "answer-fails": {"place": "ValueError: x (look.py:1)"},
    "answer-impossible": {"why": "answer.cores: expected `int`, got `str`"},
    "answer-refused": {"why": "its answer is longer than 4 MiB: does a .bashrc print there?"},
    "answer-late": {"seconds": 30.0},
    "connection-broke": {"why": ": Broken pipe"},
    "python-missing": {"python": "/opt/tandem/env/bin/python", "reason": "no such file"},
    "python-fails": {"python": "/opt/tandem/env/bin/python", "reason": "No module named json"},
    "gpu-unknown": {"visible": "7", "count": 2},
    "gpus-hidden": {"gpus": 2, "count": 1},
    "gpus-missing": {"listed": "gpus=4", "count": 1},
    "gpus-unusable": {"gpus": 2, "why": "its torch is built without CUDA: run `make provision`."},
    "no-gpu": {"why": "it has no GPU."},
    "imports": {
        **{"program": "SCRIPT=train.py", "missing": "pandas"},
        "python": "/opt/tandem/env/bin/python",
    },
    "script-stack": {"lacks": "numpy 2.1"},
    "ways-unknown": {"why": "no answer within 15 s"},
    "owner-there": {"sign": owned.SIGNS["seat"]},
    "owner-unknown": {"why": "it gave no answer"},
    "outside-hours": {"hours": "19:00-07:30,sat,sun"},
    "used-lately": {"minutes": 10},
}
# Of several, of this one, of the model or the script.
OF_ALL = {
    "unreached": {"reason": "node2 (tandem@192.0.2.2, port 22): cannot be reached: ..."},
    "examples": {},
    **{
        f"{kind}-{code}": {
            "what": "the data's train folder",
            "source": source,
            "own": "30 images in 3 classes",
            "whole": "50 images in 5 classes",
        }
        for kind, source in (("copy", "/home/ann/tandem/data/set"), ("share", "node1"))
        for code in ("lacks", "differs")
    },
    "files-differ": {
        "what": "the data folder",
        "values": "20000 files of 9 bytes, 1234abcd (node1), 5 files of 9 bytes, 5678abcd (node2)",
    },
    "control-disk-full": {"free": 90},
    "control-disk-low": {"free": 900},
    "gpu-named-twice": {"names": "node1, node2"},
    "script-packages": {"reason": "requirements.txt cannot be gathered: ..."},
    "python-differs": {"values": "3.11 (node1), 3.12 (node2)"},
    "no-way": {
        **{"of": "node1 (192.0.2.1)", "peer": "node2", "address": "192.0.2.2", "port": 29531},
        "why": "No route to host",
    },
    "master-loopback": {"address": "127.0.1.1"},
    "port-taken": {"port": 22},
    "no-port": {"first": 29500, "last": 29531},
    "several-cards": {"ways": "192.0.2.2 by eno1, 192.0.2.3 by tun0"},
}


def of_machines():
    """Every problem that keeps a run from starting, and what passes over it."""
    hosts = [host(1), host(2, cuda_home="/usr/local/cuda-10.2")]
    shown = {*OF_ONE, *OF_ALL}
    for name, changes in MACHINES.items():
        alike = "gpus" in changes and name != "driver fails"
        known = [facts(1, gpus=gpus(1)) if alike else facts(1), facts(2, **changes)]
        asked = needs(Config(data=FOLDERS.get(name, "/d")), model="resnet18")
        found = problems(hosts, known, asked)
        shown.update(one.code for one in found)
        yield f"machine: {name}", "\n".join(map(kind_of, found))
    for code, values in OF_ONE.items():
        yield f"machine: {code}", kind_of(problem(code, host(2), **values))
    for code, values in OF_ALL.items():
        yield f"machine: {code}", kind_of(problem(code, name="node2", **values))
    assert shown == RULES.keys(), shown ^ RULES.keys()


def kind_of(problem):
    return f"({problem.blocks.value}, {problem.code}) {problem.text}"


def refused(number, text):
    return NoValidConnectionsError({("192.0.2.7", 22): OSError(number, text)})


def of_ssh():
    shown, known = (paramiko.ECDSAKey.generate() for _ in range(2))
    for code, error in {
        "another key": paramiko.BadHostKeyException("192.0.2.7", shown, known),
        "unknown key": paramiko.SSHException("Server '192.0.2.7' not found in known_hosts"),
        "revoked key": ssh.Revoked("192.0.2.7"),
        "no login": paramiko.AuthenticationException("Authentication failed."),
        "no method": paramiko.SSHException("No authentication methods available"),
        "refused": refused(111, "Connection refused"),
        "no route": refused(113, "No route to host"),
        "no answer": TimeoutError("timed out"),
        "no name": socket.gaierror(-2, "Name or service not known"),
        "other": OSError(5, "Input/output error"),
        "closed": EOFError(),
    }.items():
        yield f"ssh: {code}", ssh.connection_error(host(7), error)


def of_ends():
    process = Process(7, "python x")
    rest = ("killed", None, None, None, 0.0, 1.0, {})
    exits = {
        "node1": Exit(*rest, ended=[], left=[]),
        "node2": Exit(*rest, ended=[process], left=[]),
        "node3": Exit(*rest, ended=[], left=[process] * 7),
    }
    outcome = Outcome("failed", None, 1.0, ["node4"], exits, ["node5"])
    yield "end: machines", "\n".join(attempts.describe_leftovers(outcome))
    nobody = Outcome("failed", None, 1.0, ["node1", "node2"], {})
    yield "end: nobody answers", "\n".join(attempts.describe_leftovers(nobody))
    yield "end: not saved", attempts.explain_how_to_resume("r", False, None)
    yield "end: saved", attempts.explain_how_to_resume("r", True, worker(exit_code=9))
    yield "end: diverged", attempts.explain_how_to_resume("r", True, FAILURES["diverged"])
    yield "end: script", attempts.explain_missing_resume_args()
    yield (
        "end: disk",
        attempts.explain_uncopied_files(Path("/data/runs/r"), OSError("No space left")),
    )


def render():
    return {
        **dict(of_failures()),
        **dict(of_machines()),
        **dict(of_ssh()),
        **dict(of_ends()),
        **{f"owner: {name}": text for name, text in owned.SIGNS.items()},
        **{f"wait: {name}": text.format("images") for name, text in WORDS.items()},
    }
