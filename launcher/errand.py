"""Carries out a single attempt that belongs to no run: a measurement (measure.py) or an evaluation
(evaluate.py).
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from contract.errors import BAD_INPUT, UserError
from launcher import folders
from launcher.folders import relative
from launcher.lifecycle import watch_guards
from launcher.look import OpenMachines
from launcher.machines.engine import Busy
from launcher.plan.plan import Plan
from launcher.plan.sending import deliveries
from launcher.problems import BUSY_REMEDY
from launcher.terminal import Stopper, Terminal, waiting
from launcher.watch.attempts import Attempts, describe_leftovers, write_json
from launcher.watch.failures import READ_BELOW, explain_failure
from launcher.watch.guards import deliver
from launcher.watch.lines import RunLogs


def perform_errand(
    folder: Path,
    plan: Plan,
    machines: OpenMachines,
    terminal: Terminal,
    announcement: str,
    purpose: str,
    *,
    shows_lines: bool = False,
) -> Attempts:
    """Carry the plan out and return its attempt. `purpose`: a participle for messages, such as
    `measured`; with `shows_lines` the terminal shows what the ranks print. Raises UserError if the
    attempt did not finish."""
    with folders.writing(folder / "plan.json"):
        write_json(folder / "plan.json", plan.document(), mode=0o600)
    terminal.open_log(folder / "controller.log")
    with waiting(terminal, "sending the code"):
        deliver(deliveries(plan.program), machines, terminal.say)
    terminal.say(announcement)
    attempts = Attempts(folder)
    attempts.begin(plan, "first attempt", time.time())
    logs = RunLogs(folder, terminal, plan.world_size, shown=shows_lines)
    with Stopper().listening() as stopper:
        outcome = watch_guards(plan, machines, logs, stopper)
    attempts.end(outcome)
    attempts.close(outcome.status)
    if outcome.status == "finished":
        return attempts

    # The lines that were shown have the reason already, so the folder would add nothing.
    cause = outcome.cause
    is_refusal = cause is not None and (cause.source == "busy" or cause.exit_code == BAD_INPUT)
    if is_refusal and shows_lines:
        terminal.close_log()
        shutil.rmtree(folder, ignore_errors=True)
    if cause is not None and cause.source == "busy":
        raise Busy(f"{cause.host}: {cause.message}: {BUSY_REMEDY}.")
    terminal.say(*describe_leftovers(outcome))
    terminal.drain()
    if cause is None:
        raise UserError(f"stopped before it could be {purpose}.")
    # The user did not see a measurement's lines, so one sentence names the cause and the remedy, or
    # the log to read.
    message, remedy = explain_failure(cause)
    # Without a rank, torch's launcher failed and not the program: its last line has the reason.
    is_launch = cause.rank is None
    if is_launch and cause.last_lines:
        message = f"{cause.host}: {cause.last_lines[-1]}"
    if is_launch or remedy == READ_BELOW:
        name = "launch.log" if is_launch else f"rank{cause.rank}.log"
        remedy = f"read {relative(folder / 'nodes' / cause.host / name)}"
    raise UserError(f"it could not be {purpose}: {message.rstrip('.')}: {remedy}.")
