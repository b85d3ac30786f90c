"""Starts the guard so that no process of the run survives the guard's death: as a systemd service,
which the kernel ends as a whole, or below wardens, which are processes that end all descendants.
See "How nothing is left behind" in docs/guard-protocol.md. __main__.py calls `main`."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from launcher.node import guard
from launcher.node.machine import IN_JOB
from launcher.node.processes import (
    become_subreaper,
    decode_status,
    die_with_parent,
    end_descendants,
    reap,
)

CODE = pathlib.Path(__file__).resolve().parent
SERVICE_MARK = "TANDEM_GUARD_SERVICE"  # in the environment of a guard that is a service already
PROPERTIES = ["KillMode=control-group", "TimeoutStopSec=4", "TasksMax=infinity"]
# {property: the first version of systemd with this property}. Without the first property, a data
# loader that the kernel kills for lack of memory would end the guard without a report. With the
# second property, systemd-oomd spares the run. Before version 252, systemd-oomd ignores the
# property on a user's services (systemd.resource-control(5)), for which role base helps.
SINCE = {"OOMPolicy=continue": 243, "ManagedOOMPreference=omit": 248}
WARDENS = 2  # processes above the guard that only wait
SHUTDOWN_SECONDS = 5  # that the guard has to end the run itself, before a warden ends everything
JOURNAL_SECONDS = 2.0  # until the journal has the lines about a service's end


def main(arguments):
    """Run the guard as a service if possible, else below wardens. Returns its exit code. The first
    of the `arguments` names the service's unit."""
    # The variable is set if this process is the service that another call of main() has started.
    if os.environ.pop(SERVICE_MARK, None):
        return guard.serve("service", None)
    name = re.sub(r"[^A-Za-z0-9_-]", "-", arguments[0] if arguments else "run")
    unit = "tandem-{}-{}".format(name, os.getpid())
    try:
        command = service_command(unit)
    except NoService as error:
        fallback_reason = str(error)
        return run_below_wardens(lambda: guard.serve("wardens", fallback_reason))
    code = subprocess.call(command)  # with this process's stdin and stdout
    if code != 0 and ended_by_oomd(unit):
        print("systemd-oomd ended this service, for lack of memory", file=sys.stderr)
    return code


def ended_by_oomd(unit):
    """Return whether the journal says that systemd-oomd ended a service in the last minute. Some
    users may not read the journal."""
    # `NAME.service: systemd-oomd killed 3 process(es) in this unit.` is a line of systemd.
    # `Killed /user.slice/.../NAME.service due to memory pressure ...` is a line of systemd-oomd.
    pattern = re.compile(
        r"^{0}\.service: systemd-oomd killed|^Killed \S*/{0}\.service due to ".format(unit), re.M
    )
    argv = ["journalctl", "--quiet", "--no-pager", "--output=cat", "--since=-1min"]
    argv += ["--identifier=systemd", "--identifier=systemd-oomd"]
    deadline = time.monotonic() + JOURNAL_SECONDS
    while True:
        result = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if pattern.search(result.stdout.decode(errors="replace")):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)


class NoService(Exception):
    """This user cannot have a service on this machine; the text is the reason."""


def service_command(unit):
    """Return the command that runs this guard as a service. Raises NoService."""
    if IN_JOB in os.environ:
        raise NoService("a service would leave the job, which Slurm ends as a whole")
    if not pathlib.Path("/run/systemd/system").is_dir():
        raise NoService("this machine does not run systemd")
    reasons = []
    for manager in managers():
        flags = [*manager, "--quiet", "--pipe", "--wait", "--collect"]
        error = find_error([*flags, "true"])
        if error is None:
            break
        reasons.append("{}: {}".format(" ".join(manager[:3]), error))
    else:
        raise NoService("; ".join(reasons))
    # systemd-run refuses a property that this version of systemd does not have.
    properties = [*PROPERTIES, "WorkingDirectory={}".format(pathlib.Path.cwd())]
    text = subprocess.check_output(["systemd-run", "--version"], universal_newlines=True)
    match = re.match(r"systemd (\d+)", text)
    version = int(match.group(1)) if match else 0
    properties += [name for name, since in SINCE.items() if version >= since]
    options = ["--unit=" + unit, "--description=Tandem training", "--setenv=" + SERVICE_MARK + "=1"]
    for setting in properties:
        options += ["-p", setting]
    return [*flags, *options, sys.executable, "-IB", str(CODE), unit]


def managers():
    """Return the beginning of a systemd-run command for each manager of services that this user may
    reach, the least privileged one first."""
    if os.getuid() == 0:
        return [["systemd-run"]]
    # Some ssh servers make a login without a session, which lacks this variable.
    runtime = os.environ.setdefault("XDG_RUNTIME_DIR", "/run/user/{}".format(os.getuid()))
    user_manager = [["systemd-run", "--user"]] if pathlib.Path(runtime, "systemd").is_dir() else []
    ids = ["--uid={}".format(os.getuid()), "--gid={}".format(os.getgid())]
    return [*user_manager, ["sudo", "-n", "systemd-run", *ids]]


def find_error(command):
    """Run a command that should do nothing. Returns None if it works, else why it fails."""
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=10,
            universal_newlines=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines() or ["exit code {}".format(result.returncode)]
    return lines[-1]


def run_below_wardens(run):
    """Call `run` in a grandchild of this process. Returns the exit code in each of the three
    processes: this one and its child are the wardens."""
    signal.pthread_sigmask(signal.SIG_BLOCK, guard.WATCHED)
    # Only the control node ends a run: the signals of a terminal must not.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for _ in range(WARDENS):
        # Each process is a subreaper, so that a survivor gets the children of a killed process.
        become_subreaper()
        parent = os.getpid()
        child = os.fork()
        if child:
            return wait_for(child)
        die_with_parent(signal.SIGUSR1, parent)
        os.setsid()  # a signal to the process group of ssh's command must not reach the child
    return run()


def wait_for(child):
    """Wait until the child or the parent of this process has ended, and then end all descendants.
    Returns the child's exit code, or 1."""
    code = 1
    while True:
        number = signal.sigwaitinfo(guard.WATCHED).si_signo
        if number == signal.SIGCHLD:
            statuses = reap()
            if child in statuses:
                code, _ = decode_status(statuses[child])
                break
        elif number == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        else:
            # SIGUSR1: the parent was killed. Let the guard end the run, but only for a few seconds.
            os.kill(child, signal.SIGUSR1)
            signal.sigtimedwait([signal.SIGCHLD], SHUTDOWN_SECONDS)
            break
    end_descendants()
    return 1 if code is None else code
