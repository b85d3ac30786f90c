"""A run on machines that are ready, from its first attempt to its report."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

from contract.errors import BAD_INPUT, UserError
from contract.text import pluralize
from launcher import folders, hours, look
from launcher.background import MIB
from launcher.folders import relative
from launcher.look import OpenMachines
from launcher.machines.engine import Busy, MachineError
from launcher.machines.inventory import CHECKOUT
from launcher.notify import Notify, of_run
from launcher.participants import Participants, Waiter
from launcher.plan.checks import ReadyRun, make_plan
from launcher.plan.plan import NodePlan, Plan
from launcher.problems import BUSY_REMEDY
from launcher.terminal import Stopper, Terminal, waiting
from launcher.watch import attempts
from launcher.watch.attempts import (
    Attempts,
    Outcome,
    cannot_go_on,
    describe,
    exit_code,
    how_to_resume,
    leftovers,
)
from launcher.watch.failures import Failure
from launcher.watch.guards import deliver, start_guards
from launcher.watch.lines import RunLogs
from launcher.watch.watch import Watch
from launcher.workload import RunSite, Workload


def run_attempt(
    plan: Plan,
    machines: OpenMachines,
    logs: RunLogs,
    stopper: Stopper,
    participants: Participants | None = None,
) -> Outcome:
    """Start the guards of an attempt and stay until all have ended."""
    processes = start_guards(plan, machines)
    try:
        return Watch(plan, processes, logs, stopper, participants).run()
    finally:
        with waiting(logs.terminal, "writing the logs to this machine's disk"):
            logs.close()
        for process in processes.values():
            process.close()


class Run:
    """One run: its attempts, then its files and its report."""

    def __init__(self, checked: ReadyRun, folder: Path, terminal: Terminal):
        self.checked = checked
        self.machines, self.participants = checked.machines, checked.participants
        self.folder = folder
        self.terminal = terminal
        self.notify = Notify(checked.run_config.notify, terminal)
        self.attempts = Attempts(folder)
        # Of a run that is resumed.
        self.before, self.earlier = self.attempts.status, len(self.attempts.list)
        self.last: str | None = None  # the checkpoint that was found for the next attempt
        self.parts: dict[str, NodePlan] = {}  # of every machine that ever took part
        self.most = checked.run_config.keep * MIB  # bytes of a file that a machine sends
        self._lock = folders.lock(folder)

    def unlock(self) -> None:
        self._lock.close()

    def carry_out(self, plan: Plan, reason: str) -> int:
        """All attempts, the files and the report, and NOTIFY's command. Returns the exit code."""
        try:
            outcome, whole = self._carry_out(plan, reason)
        except UserError as error:
            if not isinstance(error, Busy):
                self.notify.send(of_run(self.folder, "failed", str(error)))
            raise
        cause = self.attempts.list[-1]["first_cause"] if outcome.cause else None
        self.notify.send(of_run(self.folder, outcome.status, cause and cause["message"]))
        return exit_code(outcome, whole)

    def _carry_out(self, plan: Plan, reason: str) -> tuple[Outcome, bool]:
        self.terminal.keep_in(self.folder / "controller.log")
        folders.point_latest(self.folder)
        until = self.checked.run_config.until
        with (
            Stopper().listening() as stopper,
            hours.ending(until, self.terminal),
            self.participants.looking(),
        ):
            outcome = self._attempts(plan, reason, stopper)
        refused = plan.attempt > 1 and self._refused(outcome)
        self.attempts.close(self.before if refused else outcome.status)
        present = {host.name for host in self.machines.hosts}
        lost = outcome.status == "failed" or bool(outcome.gone or outcome.unresponsive)
        if lost or not present.issuperset(self.parts):
            self._reconnect()
        try:
            saved, whole = self._collect()
            how = how_to_resume(self.folder.name, saved, outcome.cause)
            how = how if self.workload.can_go_on else cannot_go_on()
            if outcome.status != "finished":
                self.attempts.say_how(how)
            whole = make_report(self.folder, self.terminal) and whole
        except KeyboardInterrupt:
            name = self.folder.name
            self.terminal.say(
                f"`make report RUN={name}` makes its report from what has been copied so far"
            )
            raise
        finally:
            self.machines.close()
        if self.attempts.problem:
            self.terminal.say(self.attempts.problem)
            whole = False
        if outcome.status != "finished":
            self.terminal.say(how)
        self.terminal.drain()
        return outcome, whole

    def _refused(self, outcome: Outcome) -> bool:
        """Whether nothing was done since the run was resumed, so that it is as it was before."""
        done = self.attempts.list[self.earlier :]
        bad_input = outcome.cause is not None and outcome.cause.exit_code == BAD_INPUT
        return self.before != "running" and (not done or (len(done) == 1 and bad_input))

    def _attempts(self, plan: Plan, reason: str, stopper: Stopper) -> Outcome:
        limits = attempts.Limits(self.checked.run_config.max_restarts)
        while True:
            try:
                outcome = self._attempt(plan, reason, stopper)
            except UserError as error:
                if plan.attempt == 1 or stopper.asked:
                    self.attempts.close("failed")
                    raise
                if not isinstance(error, MachineError):  # other machines would not help
                    return self._give_up(error, Outcome("failed", None, 0.0, [], {}))
                outcome = self._record_loss(plan, reason, error)
            first = len(self.attempts.list) == self.earlier + 1
            if first and outcome.cause is not None and outcome.cause.source == "busy":
                self.attempts.close(self.before)
                raise Busy(f"{outcome.cause.host}: {outcome.cause.message}: {BUSY_REMEDY}.")
            self._report_outcome(outcome)
            decision = attempts.decide(outcome, limits)
            if outcome.regroup and self.workload.can_go_on:
                decision = limits, outcome.regroup
            if decision is None or stopper.asked:
                return outcome
            limits, reason = decision
            self.terminal.say(f"starting again: {reason}")
            try:
                plan = self._next(plan, limits, stopper)
            except UserError as error:
                return self._give_up(error, outcome)

    def _give_up(self, error: UserError, outcome: Outcome) -> Outcome:
        """Say why no attempt follows that would change the outcome."""
        for problem in error.problems:
            self.terminal.say(problem)
        return outcome

    def _record_loss(self, plan: Plan, reason: str, error: MachineError) -> Outcome:
        """Machines that answered a moment ago no longer do: record an attempt that failed."""
        message = " ".join(error.problems)
        failure = Failure(host=error.hosts[0], source="gone", order=0, message=message)
        outcome = Outcome("failed", failure, 0.0, error.hosts, {})
        if self.attempts.list[-1]["attempt"] != plan.attempt:
            self.attempts.begin(plan, reason, time.time())
        self.attempts.end(outcome)
        return outcome

    def _next(self, old: Plan, limits: attempts.Limits, stopper: Stopper) -> Plan:
        """The plan of the next attempt, on the machines that answer. Raises UserError."""
        self.machines.close()
        needs = dataclasses.replace(self.checked.needs, run=old.run)
        saved = self.workload.is_trainer and self.attempts.saved(self.folder)
        waiter = Waiter.later(self.terminal, self.notify, stopper, saved)
        with waiting(self.terminal, "finding out which machines answer"):
            self.machines = self.participants.later(needs, waiter)
        last = self.find_checkpoint()
        here = {host.name for host in self.machines.hosts}
        if here != set(self.attempts.list[-1]["nodes"]):
            hosts, terminal, config = (
                self.participants.hosts,
                self.terminal,
                self.checked.run_config,
            )
            workload = self.workload.for_attempt(config, hosts, self.machines, terminal)
            needs = dataclasses.replace(self.checked.needs, workload=workload)
            self.checked = dataclasses.replace(self.checked, needs=needs)
        return make_plan(
            self.checked,
            self.machines,
            last=last,
            run=old.run,
            attempt=old.attempt + 1,
            used_ports=self.attempts.ports,
            bar=self.terminal.columns,
            extra_env=limits.environment(),
        )

    @property
    def workload(self) -> Workload:
        return self.checked.workload

    @property
    def site(self) -> RunSite:
        needs, hosts = self.checked.needs, self.participants.hosts
        return RunSite(self.folder, needs, hosts, self.machines, self.attempts, self.terminal)

    def find_checkpoint(self) -> str | None:
        """What the next attempt is told that it goes on from. Raises UserError."""
        last = self.workload.find_checkpoint(self.site)
        self.last = last or None
        return last

    def _attempt(self, plan: Plan, reason: str, stopper: Stopper) -> Outcome:
        if self.attempts.list:
            self.workload.place_checkpoints(self.site, plan)
        with waiting(self.terminal, "sending the code"):
            deliver(self.workload.deliveries(), self.machines, self.terminal.say)
        self.parts.update({node.host: node for node in plan.nodes})
        self.terminal.say(
            f"run {plan.run}, attempt {plan.attempt}: {pluralize(len(plan.nodes), 'node')}, "
            f"{pluralize(plan.world_size, 'process')}"
        )
        self.attempts.begin(plan, reason, time.time(), self.last)
        logs = RunLogs(self.folder, self.terminal, plan.world_size)
        needs = dataclasses.replace(self.checked.needs, run=plan.run)
        self.participants.attempt_began(self.machines, needs)
        try:
            outcome = run_attempt(plan, self.machines, logs, stopper, self.participants)
        finally:
            self.participants.attempt_ended()
        if cause := outcome.cause:
            hint = self.workload.hint(cause)
            outcome = dataclasses.replace(outcome, cause=dataclasses.replace(cause, file_hint=hint))
        self.attempts.end(outcome)
        return outcome

    def _report_outcome(self, outcome: Outcome) -> None:
        lines = []
        if outcome.cause is not None:
            lines += describe(self.attempts.list[-1]["first_cause"])
        if outcome.status != "finished":
            lines += [*outcome.silent_ranks, *leftovers(outcome)]
        for line in lines:
            self.terminal.say(line)

    def _reconnect(self) -> None:
        """Connect again: some machines may be gone by now, and some may be back."""
        self.machines.close()
        hosts, needs = self.participants.hosts, self.checked.needs
        with waiting(self.terminal, "finding out which machines answer"):
            self.machines = look.open_and_probe(hosts, needs, without_missing=True)
        here = {host.name for host in self.machines.hosts}
        for name in self.parts:
            if name not in here:
                self.terminal.say(f"{name} does not answer: its records stay on it")

    def _collect(self) -> tuple[bool, bool]:
        """Bring the files here. Returns whether a checkpoint was saved anywhere, and whether this
        machine has all that it should."""
        site = self.site
        there = {name: folder for name, folder in site.folders.items() if name in self.parts}
        with waiting(self.terminal, "copying records and checkpoints to this machine"):
            collected = self.workload.collect(site, there, self.most)
        self.attempts.read_resumed(self.folder)
        for line in collected.said:
            self.terminal.say(line)
        return collected.saved, collected.is_whole


REPORT = (sys.executable, "-m", "report")


def make_report(folder: Path, terminal: Terminal) -> bool:
    """Make and show the report. Returns whether that worked; the training is valid either way."""
    with waiting(terminal, "making the report"):
        done = subprocess.run(
            [*REPORT, str(relative(folder))],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    lines = done.stdout.splitlines()
    if done.returncode == 0:
        for line in lines:
            terminal.line(line)
    else:
        why = lines[-1] if lines else f"exit code {done.returncode}"
        terminal.say(
            f"the report could not be made ({why}): the run is as it was, and "
            f"`make report RUN={folder.name}` makes its report again"
        )
    terminal.say(f"everything is in {relative(folder)}")
    return done.returncode == 0
