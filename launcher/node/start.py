"""Starts the guard so that its death leaves no orphans: as a systemd service, or below wardens.

docs/guard-protocol.md, "How nothing is left behind".
"""

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
# {property: the first version of systemd that has it}. Without the first property a killed data
# loader ends the guard unreported. With the second systemd-oomd spares the run when memory is
# short; before 252 it ignores that on a user's services (systemd.resource-control(5)), where role
# base helps.
SINCE = {"OOMPolicy=continue": 243, "ManagedOOMPreference=omit": 248}
WARDENS = 2  # processes above the guard that only wait
SHUTDOWN_SECONDS = 5  # that the guard gets to end the run itself
JOURNAL_SECONDS = 2.0  # after which the journal has the lines about a service's end


def main(arguments):
    """Run the guard as a service if possible, else below wardens. Returns its exit code."""
    # This process is that service.
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
    """Return whether systemd-oomd ended a service just now, as far as this user may read it in the
    journal."""
    # A line of systemd, or one of systemd-oomd.
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
    """This user cannot have a service here; the text is the reason."""


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
            return [*flags, *unit_options(unit), sys.executable, "-IB", str(CODE), unit]
        reasons.append("{}: {}".format(" ".join(manager[:3]), error))
    raise NoService("; ".join(reasons))


def managers():
    """Return the first words of systemd-run for each manager that may serve this user, the least
    privileged first."""
    if os.getuid() == 0:
        return [["systemd-run"]]
    # A login without a session, as some ssh servers give it, lacks this variable.
    runtime = os.environ.setdefault("XDG_RUNTIME_DIR", "/run/user/{}".format(os.getuid()))
    user_manager = [["systemd-run", "--user"]] if pathlib.Path(runtime, "systemd").is_dir() else []
    ids = ["--uid={}".format(os.getuid()), "--gid={}".format(os.getgid())]
    return [*user_manager, ["sudo", "-n", "systemd-run", *ids]]


def unit_options(unit):
    """Return systemd-run's options about the unit."""
    properties = [*PROPERTIES, "WorkingDirectory={}".format(pathlib.Path.cwd())]
    text = subprocess.check_output(["systemd-run", "--version"], universal_newlines=True)
    match = re.match(r"systemd (\d+)", text)
    version = int(match.group(1)) if match else 0
    properties += [name for name, since in SINCE.items() if version >= since]
    options = ["--unit=" + unit, "--description=Tandem training", "--setenv=" + SERVICE_MARK + "=1"]
    for setting in properties:
        options += ["-p", setting]
    return options


def find_error(command):
    """Run a command that should do nothing. Returns None if it works, else the reason."""
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
    """Call `run` in a grandchild. Returns the exit code, in each of the three processes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, guard.WATCHED)
    # Only the control side ends a run: a terminal's signals must not.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for _ in range(WARDENS):
        # Each is a subreaper: a survivor inherits the children of the others.
        become_subreaper()
        parent = os.getpid()
        child = os.fork()
        if child:
            return wait_for(child)
        die_with_parent(signal.SIGUSR1, parent)
        os.setsid()  # a signal to the control side's process group must not reach these
    return run()


def wait_for(child):
    """Wait until the child ends or the process above has ended; then end all descendants. Returns
    the child's exit code, or 1."""
    code = 1
    while True:
        number = signal.sigwaitinfo(guard.WATCHED).si_signo
        if number == signal.SIGCHLD:
            statuses = reap()
            if child in statuses:
                code = decode_status(statuses[child])[0]
                break
        elif number == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        else:
            # The process above was killed: the guard ends the run, for a few seconds by itself.
            os.kill(child, signal.SIGUSR1)
            signal.sigtimedwait([signal.SIGCHLD], SHUTDOWN_SECONDS)
            break
    end_descendants()
    return 1 if code is None else code
