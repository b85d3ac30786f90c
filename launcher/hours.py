"""Starts and ends runs by the clock: AT= begins a run later, UNTIL= saves and ends it. Until then
the control node does not suspend automatically."""

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
from launcher.terminal import Terminal, in_thread

# Between two looks at the clock, which may be set, or stand still while the PC sleeps.
LOOK_SECONDS = 15.0


def read_times(at: str | None, until: str | None) -> dict[str, int]:
    """Read AT= and UNTIL=, times of day like `19:00`. Returns the next such time for `at`, and for
    `until` the first after it, in Unix seconds of the control node's clock. Raises UserError."""
    times: dict[str, int] = {}
    for variable, text in (("at", at), ("until", until)):
        if text is None:
            continue
        match = re.fullmatch("([01]?[0-9]|2[0-3]):([0-5][0-9])", text)
        if match is None:
            name = variable.upper()
            raise UserError(f"{name}={text}: type a time of day, such as 19:00 or 07:30.")
        # UNTIL counts from the beginning of the run: AT=19:00 UNTIL=7:30 ends on the next morning.
        earliest = datetime.fromtimestamp(times.get("at", time.time()))
        hour, minute = map(int, match.groups())
        day = earliest.replace(hour=hour, minute=minute, second=0, microsecond=0)
        day += timedelta(days=day <= earliest)
        times[variable] = int(day.timestamp())
    return times


def show_time(unix: int) -> str:
    """Return `19:00`, with the day if it is not today."""
    day = datetime.fromtimestamp(unix)
    is_today = datetime.now().date() == day.date()
    return day.strftime("%H:%M" if is_today else "%H:%M on %A")


def wait_until(begin_unix: int | None, terminal: Terminal) -> bool:
    """Wait until that time. Returns False if the time is past, or None."""
    if begin_unix is None or time.time() >= begin_unix:
        return False
    begin = show_time(begin_unix)
    duration = timedelta(seconds=round(begin_unix - time.time()))
    terminal.say(f"waits until {begin} ({duration} from now): Ctrl-C cancels it")
    terminal.result(waits=f"until {begin}")
    with keep_awake(f"a run begins at {begin}", terminal):
        while (missing := begin_unix - time.time()) > 0:
            time.sleep(min(LOOK_SECONDS, missing))
    return True


@contextlib.contextmanager
def end_at(until: int | None, terminal: Terminal) -> Iterator[None]:
    """End the run in the body at that time, as `make stop` does: the workers save, then exit."""
    if until is None:
        yield
        return

    def watch(over: threading.Event) -> None:
        # A signal to this process, so that UNTIL ends a run exactly as `make stop` does.
        while not over.wait(min(LOOK_SECONDS, max(0.0, until - time.time()))):
            if time.time() >= until:
                terminal.say(
                    f"it is {show_time(until)} (UNTIL): the run saves a checkpoint and ends"
                )
                os.kill(os.getpid(), signal.SIGTERM)
                return

    terminal.say(f"the run ends at {show_time(until)} at the latest, and can be resumed later")
    with keep_awake(f"a run lasts until {show_time(until)}", terminal), in_thread("until", watch):
        yield


@contextlib.contextmanager
def keep_awake(reason: str, terminal: Terminal) -> Iterator[None]:
    """Keep the control node from suspending automatically while the body runs, by systemd-logind,
    or report that it may suspend. A user may still close the lid or choose suspend."""
    program = shutil.which("systemd-inhibit")
    process = None
    if program:
        # systemd-inhibit holds its lock while `tail` runs, which ends when this process ends, even
        # if it is killed.
        tail = ("tail", f"--pid={os.getpid()}", "--follow", os.devnull)
        options = ("--what=sleep:idle", "--who=Tandem", f"--why={reason}")
        process = subprocess.Popen(
            [program, *options, *tail],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Without permission, or without logind, systemd-inhibit ends at once.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    if process is None or process.poll() is not None:
        terminal.say(
            "the control node may go to sleep during the run, because systemd-inhibit could "
            "not prevent it: switch off automatic suspend in its settings"
        )
    try:
        yield
    finally:
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
