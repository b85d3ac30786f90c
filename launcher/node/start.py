"""Chooses what keeps the guard's death from leaving orphans: a systemd service, or else wardens.

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
# {property: the version of systemd since which it is there}. Without the first a killed data loader
# ends the guard unreported. By the second systemd-oomd spares the run when memory is short, which
# it heeds on a user's services from 252 on (systemd.resource-control(5)); role base helps before.
SINCE = {"OOMPolicy=continue": 243, "ManagedOOMPreference=omit": 248}
WARDENS = 2  # processes above the guard that only wait
SHUTDOWN_SECONDS = 5  # seconds the guard gets to end the run itself
JOURNAL_SECONDS = 2.0  # in which the journal has what was said of a service's end


def main(arguments):
    """Be the guard, or wait for it, in the best way available. Returns its exit code."""
    if os.environ.pop(SERVICE_MARK, None):
        return guard.serve("service", None)
    unit = re.sub(r"[^A-Za-z0-9_-]", "-", arguments[0] if arguments else "run")
    try:
        command = service_command("tandem-{}-{}".format(unit, os.getpid()))
    except NoService as error:
        why = str(error)
        return run_under_guard(lambda: guard.serve("wardens", why))
    code = subprocess.call(command)  # stdin and stdout go on as they are
    if code != 0 and ended_by_oomd("tandem-{}-{}".format(unit, os.getpid())):
        print("systemd-oomd ended this service, for lack of memory", file=sys.stderr)
    return code


def ended_by_oomd(unit):
    """Whether the journal, as far as this user may read it, says that systemd-oomd ended a service
    just now: systemd's own line, or systemd-oomd's."""
    said = re.compile(
        r"^{0}\.service: systemd-oomd killed|^Killed \S*/{0}\.service due to ".format(unit), re.M
    )
    argv = ["journalctl", "--quiet", "--no-pager", "--output=cat", "--since=-1min"]
    argv += ["--identifier=systemd", "--identifier=systemd-oomd"]
    until = time.monotonic() + JOURNAL_SECONDS
    while True:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if said.search(done.stdout.decode(errors="replace")):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)


class NoService(Exception):
    """This user cannot have a service here; the text says why."""


def service_command(unit):
    """The command that runs this guard as a service. Raises NoService."""
    if IN_JOB in os.environ:
        raise NoService("a service would leave the job, which Slurm ends as a whole")
    if not pathlib.Path("/run/systemd/system").is_dir():
        raise NoService("this machine does not run systemd")
    reasons = []
    for manager in managers():
        flags = [*manager, "--quiet", "--pipe", "--wait", "--collect"]
        found = attempt([*flags, "true"])
        if found is None:
            return [*flags, *settings(unit), sys.executable, "-IB", str(CODE), unit]
        reasons.append("{}: {}".format(" ".join(manager[:3]), found))
    raise NoService("; ".join(reasons))


def managers():
    """The first words of systemd-run for each manager that may serve this user, the least
    privileged first."""
    if os.getuid() == 0:
        return [["systemd-run"]]
    runtime = os.environ.setdefault("XDG_RUNTIME_DIR", "/run/user/{}".format(os.getuid()))
    mine = [["systemd-run", "--user"]] if pathlib.Path(runtime, "systemd").is_dir() else []
    who = ["--uid={}".format(os.getuid()), "--gid={}".format(os.getgid())]
    return [*mine, ["sudo", "-n", "systemd-run", *who]]


def settings(unit):
    """The rest of systemd-run's options."""
    chosen = [*PROPERTIES, "WorkingDirectory={}".format(pathlib.Path.cwd())]
    version = systemd_version()
    chosen += [one for one, since in SINCE.items() if version >= since]
    options = ["--unit=" + unit, "--description=Tandem training", "--setenv=" + SERVICE_MARK + "=1"]
    for one in chosen:
        options += ["-p", one]
    return options


def systemd_version():
    """The number in the first line of `systemd-run --version`; 0 when there is none."""
    text = subprocess.check_output(["systemd-run", "--version"], universal_newlines=True)
    match = re.match(r"systemd (\d+)", text)
    return int(match.group(1)) if match else 0


def attempt(command):
    """Run a command that should do nothing. Returns None when it worked, otherwise why not."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=10,
            universal_newlines=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines or ["exit code {}".format(done.returncode)])[-1]


def run_under_guard(run):
    """Call `run` in a grandchild. Returns the exit code, in each of the three processes. Each is a
    subreaper: whichever survives inherits what the others left behind."""
    signal.pthread_sigmask(signal.SIG_BLOCK, guard.WATCHED)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's; the control side decides
        signal.signal(number, signal.SIG_IGN)
    for _ in range(WARDENS):
        become_subreaper()
        parent = os.getpid()
        child = os.fork()
        if child:
            return wait_for(child)
        die_with_parent(signal.SIGUSR1, parent)
        os.setsid()  # whoever ends the control side's process group must not reach these
    return run()


def wait_for(child):
    """Wait until the child ends or an end is ordered; then end all descendants."""
    code = 1
    while True:
        signals = signal.sigwaitinfo(guard.WATCHED).si_signo
        if signals == signal.SIGCHLD:
            statuses = reap()
            if child in statuses:
                code = decode_status(statuses[child])[0]
                break
        elif signals == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        else:
            os.kill(child, signal.SIGUSR1)
            signal.sigtimedwait([signal.SIGCHLD], SHUTDOWN_SECONDS)
            break
    end_descendants()
    return 1 if code is None else code
