"""What machines do together that is no run: one attempt, in a folder of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import BAD_INPUT, UserError
from launcher import folders
from launcher.folders import relative
from launcher.lifecycle import watch_guards
from launcher.look import OpenMachines
from launcher.machines.engine import Busy
from launcher.plan.code import Delivery
from launcher.plan.plan import Plan
from launcher.problems import BUSY_REMEDY
from launcher.terminal import Stopper, Terminal, waiting
from launcher.watch.attempts import Attempts, Outcome, leftovers, write_json
from launcher.watch.failures import READ_BELOW, Failure, explained
from launcher.watch.guards import deliver
from launcher.watch.lines import RunLogs


@dataclass(frozen=True)
class Errand:
    """`done`: what is then said to be done, as measured; `shown`: its lines, on the terminal."""

    folder: Path
    plan: Plan
    deliveries: Sequence[Delivery]
    machines: OpenMachines
    terminal: Terminal
    done: str
    shown: bool

    def perform(self, announcement: str) -> Attempts:
        """Raises UserError where it did not finish."""
        with folders.writing(self.folder / "plan.json"):
            write_json(self.folder / "plan.json", self.plan.document(), mode=0o600)
        self.terminal.keep_in(self.folder / "controller.log")
        with waiting(self.terminal, "sending the code"):
            deliver(self.deliveries, self.machines, self.terminal.say)
        self.terminal.say(announcement)
        attempts = Attempts(self.folder)
        attempts.begin(self.plan, "first attempt", time.time())
        logs = RunLogs(self.folder, self.terminal, self.plan.world_size, shown=self.shown)
        with Stopper().listening() as stopper:
            outcome = watch_guards(self.plan, self.machines, logs, stopper)
        attempts.end(outcome)
        attempts.close(outcome.status)
        self._refuse(outcome)
        return attempts

    def _refuse(self, outcome: Outcome) -> None:
        cause = outcome.cause
        if outcome.status == "finished":
            return
        # Its lines were shown, so that its logs would say no more.
        is_refusal = cause is not None and (cause.source == "busy" or cause.exit_code == BAD_INPUT)
        if is_refusal and self.shown:
            self.terminal.keep_no_more()
            shutil.rmtree(self.folder, ignore_errors=True)
        if cause is not None and cause.source == "busy":
            raise Busy(f"{cause.host}: {cause.message}: {BUSY_REMEDY}.")
        for line in leftovers(outcome):
            self.terminal.say(line)
        self.terminal.drain()
        if cause is None:
            raise UserError(f"stopped before it was {self.done}.")
        raise UserError(f"it could not be {self.done}: {self._why(cause)}.")

    def _why(self, cause: Failure) -> str:
        """What happened and what to do, in one sentence: nobody watches a measurement, and its
        lines are in its log."""
        message, remedy = explained(cause)
        launch = cause.rank is None
        name = "launch.log" if launch else f"rank{cause.rank}.log"
        log = relative(self.folder / "nodes" / cause.host / name)
        if launch and cause.last_lines:
            message = f"{cause.host}: {cause.last_lines[-1]}"
        if launch or remedy == READ_BELOW:
            remedy = f"read {log}"
        return f"{message.rstrip('.')}: {remedy}"
