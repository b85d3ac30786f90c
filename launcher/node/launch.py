"""Starting torch.distributed.launch on this node."""

import os
import pathlib
import resource
import signal
import subprocess
import sys

from launcher.node.machine import PATH, who
from launcher.node.processes import die_with_parent

OPEN_FILES = 65536  # data loaders pass tensors as descriptors; 1024, the usual limit, is too few


def start_launch(task, workers, mono_start, scratch):
    """Start it in a session of its own: a signal to its group spares the guard. `scratch` is a
    folder for temporary files that is the run user's alone. Raises OSError."""
    guard = os.getpid()
    stdout, stderr = workers.launch
    return subprocess.Popen(
        task.argv,
        cwd=task.cwd,
        env=environment(task, workers, mono_start, scratch),
        stdin=subprocess.DEVNULL,
        stdout=stdout.writer,
        stderr=stderr.writer,
        start_new_session=True,
        preexec_fn=lambda: prepare_child(guard),
    )


def environment(task, workers, mono_start, scratch):
    """The whole environment of launch. Only HOME comes from the guard's own, so no shell startup
    file matters."""
    name, home = who()
    here = pathlib.Path(__file__).resolve().parent
    values = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", home)}
    values.update(USER=name, LOGNAME=name, TMPDIR=scratch)
    values.update(task.env)
    values.update(TANDEM_NODE=task.host, TANDEM_ATTEMPT=str(task.attempt))
    values.update(TANDEM_GUARD_MONO=repr(mono_start))
    values.update(PYTHON_EXEC=str(here / "worker"), TANDEM_GUARD_PIPES=workers.address())
    values.update(TANDEM_WORKER_PYTHON=task.argv[0], TANDEM_GUARD_PYTHON=sys.executable)
    return values


def prepare_child(guard):
    """In the forked child, before launch takes over."""
    die_with_parent(signal.SIGKILL, guard)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
