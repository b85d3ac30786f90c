"""Runs by the clock: AT= begins one later, UNTIL= saves and ends it, and meanwhile this machine
does not go to sleep by itself."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta

from contract.errors import UserError
from launcher.terminal import Terminal, beside

# Of a wait: the clock may be set, and this machine may have slept.
LOOK_EVERY = 15.0


def moment(variable: str, text: str, after: float) -> int:
    """The next time of day like `19:00` after `after`, both by this machine's clock: Unix seconds.
    Raises UserError."""
    found = re.fullmatch("([01]?[0-9]|2[0-3]):([0-5][0-9])", text)
    if found is None:
        raise UserError(f"{variable}={text}: give a time of day like 19:00 or 07:30.")
    day = datetime.fromtimestamp(after)
    then = day.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
    if then.timestamp() <= after:
        then += timedelta(days=1)
    return int(then.timestamp())


def moments(at: str | None, until: str | None) -> dict[str, int]:
    """AT= and UNTIL= of one command, as fields of Options. Raises UserError."""
    now, found = time.time(), {}
    if at is not None:
        found["at"] = moment("AT", at, now)
    if until is not None:
        found["until"] = moment("UNTIL", until, found.get("at", now))
    return found


def shown(unix: int) -> str:
    """`19:00`, or with the day where that is not today."""
    then = datetime.fromtimestamp(unix)
    today = datetime.now().date() == then.date()
    return then.strftime("%H:%M" if today else "%H:%M on %A")


def wait(at: int | None, terminal: Terminal) -> bool:
    """Until that time; False where it is over."""
    if at is None or time.time() >= at:
        return False
    left = timedelta(seconds=round(at - time.time()))
    terminal.say(f"waits until {shown(at)} ({left} from now): Ctrl-C takes it back")
    terminal.result(waits=f"until {shown(at)}")
    with awake(f"a run begins at {shown(at)}", terminal):
        while (left_seconds := at - time.time()) > 0:
            time.sleep(min(LOOK_EVERY, left_seconds))
    return True


@contextlib.contextmanager
def ending(until: int | None, terminal: Terminal) -> Iterator[None]:
    """Ends what runs within at that time, as `make stop` does: the workers save, then exit."""
    if until is None:
        yield
        return

    def watch(over: threading.Event) -> None:
        while not over.wait(min(LOOK_EVERY, max(0.0, until - time.time()))):
            if time.time() >= until:
                terminal.say(f"it is {shown(until)} (UNTIL): the run saves and ends")
                os.kill(os.getpid(), signal.SIGTERM)
                return

    terminal.say(f"the run ends at {shown(until)} at the latest, and can go on later")
    with awake(f"a run goes on until {shown(until)}", terminal), beside("until", watch):
        yield


@contextlib.contextmanager
def awake(why: str, terminal: Terminal) -> Iterator[None]:
    """Keeps this machine from going to sleep by itself (systemd-logind), or says that it may. A lid
    that is closed, and whoever chooses suspend, are obeyed."""
    program = shutil.which("systemd-inhibit")
    held = None
    if program:
        # The lock is held for as long as this process lives, however it ends.
        tail = ("tail", f"--pid={os.getpid()}", "--follow", os.devnull)
        named = ("--what=sleep:idle", "--who=Tandem", f"--why={why}")
        held = subprocess.Popen(
            [program, *named, *tail],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            held.wait(1.0)
    if held is None or held.poll() is not None:
        terminal.say(
            "this machine may go to sleep before the run is over, which systemd-inhibit could not "
            "prevent: switch automatic suspend off in its settings, if it has any"
        )
    try:
        yield
    finally:
        if held is not None and held.poll() is None:
            os.killpg(held.pid, signal.SIGTERM)
            held.wait()
