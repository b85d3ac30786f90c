"""A run on machines that are ready, from its first attempt to its report."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

from contract.errors import BAD_INPUT, UserError
from contract.runs import folder_on_machine
from contract.text import pluralize
from launcher import checkpoints, collect, folders, hours, look, outputs
from launcher.background import MIB
from launcher.folders import relative
from launcher.look import OpenMachines
from launcher.machines.engine import Busy, MachineError
from launcher.machines.inventory import CHECKOUT
from launcher.notify import Notify, of_run
from launcher.options import results
from launcher.owners import Owners
from launcher.plan import checks, code, weights
from launcher.plan.checks import ReadyRun, make_plan
from launcher.plan.files import MOST_BYTES
from launcher.plan.plan import NodePlan, Plan
from launcher.plan.script import LAST, Script
from launcher.problems import BUSY_REMEDY
from launcher.terminal import Stopper, Terminal, waiting
from launcher.watch import attempts
from launcher.watch.attempts import (
    Attempts,
    describe,
    exit_code,
    how_to_resume,
    leftovers,
    not_copied,
    script_is_over,
)
from launcher.watch.failures import Failure
from launcher.watch.guards import start_guards, sync_code, sync_layer, sync_weights
from launcher.watch.lines import RunLogs
from launcher.watch.watch import Outcome, Watch


def run_attempt(
    plan: Plan,
    machines: OpenMachines,
    logs: RunLogs,
    stopper: Stopper,
    owners: Owners | None = None,
) -> Outcome:
    """Start the guards of an attempt and stay until all have ended."""
    processes = start_guards(plan, machines)
    try:
        return Watch(plan, processes, logs, stopper, owners).run()
    finally:
        with waiting(logs.terminal, "writing the logs to this machine's disk"):
            logs.close()
        for process in processes.values():
            process.close()


class Run:
    """One run: its attempts, then its files and its report."""

    def __init__(self, checked: ReadyRun, folder: Path, terminal: Terminal):
        self.checked = checked
        self.machines, self.owners = checked.machines, checked.owners
        self.folder = folder
        self.terminal = terminal
        self.notify = Notify(checked.options.notify, terminal)
        self.attempts = Attempts(folder)
        # Of a run that is resumed.
        self.before, self.earlier = self.attempts.status, len(self.attempts.list)
        self.last: str | None = None  # the checkpoint that a script goes on from
        self.parts: dict[str, NodePlan] = {}  # of every machine that ever took part
        self.most = checked.options.keep * MIB  # bytes of a file that a machine sends
        settings = checked.settings
        self.script = settings if isinstance(settings, Script) else None
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
        until = self.checked.options.until
        with (
            Stopper().listening() as stopper,
            hours.ending(until, self.terminal),
            self.owners.looking(),
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
            over = self.script is not None and not self.script.resume
            how = how_to_resume(self.folder.name, saved, outcome.cause)
            how = script_is_over() if over else how
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
        limits = attempts.Limits(self.checked.options.max_restarts, self.owners.least)
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
            if outcome.regroup and not (self.script and not self.script.resume):
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
        # What a script saved is known only when it is fetched.
        saved = self.script is None and self.attempts.saved(self.folder)
        tell = self.notify.wait(old.run)
        with waiting(self.terminal, "finding out which machines answer"):
            self.machines = attempts.survivors(
                self.owners, needs, limits, stopper, self.terminal, tell, saved
            )
        last = self.last_checkpoint() if self.script else None
        here = {host.name for host in self.machines.hosts}
        if not self.script and here != set(self.attempts.list[-1]["nodes"]):
            hosts, terminal = self.owners.hosts, self.terminal
            parts = checks.decide_balance(self.checked.needs, hosts, self.machines, terminal)
            self.checked = dataclasses.replace(self.checked, balance=parts)
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

    def last_checkpoint(self) -> str | None:
        """What the script goes on from in the next attempt, on every machine of it; None where it
        begins anew. Raises UserError."""
        assert self.script is not None
        if not any(LAST in word for word in self.script.resume):
            return ""
        before = self.attempts.list[-1]["nodes"] if self.attempts.list else []
        own = self._folders(self.machines)
        there = {name: own[name] for name in sorted(own, key=lambda one: one not in before)}
        nodes, say = self.machines.nodes, self.terminal.say
        with waiting(self.terminal, "looking for the newest checkpoint"):
            held = checkpoints.held_by(nodes, there, self.script.outputs)
        unfit = self.attempts.unfit(self.folder)
        found = checkpoints.Candidates(held, nodes, there, self.folder, say, unfit)
        room = max(0, folders.disk_free() - collect.DISK_LEFT)
        try:
            if self.script.resume_from:
                name = found.own()
            else:
                with waiting(self.terminal, "giving the newest checkpoint to all machines"):
                    name = found.spread(room)
        except collect.Unwritable as error:
            raise UserError(not_copied(self.folder, error)) from None
        self.last = name
        names = ", ".join(self.script.outputs)
        nothing = f"no checkpoint was found in {names}: the script begins anew"
        self.terminal.say(f"the script goes on from {name}" if name else nothing)
        return name

    def _attempt(self, plan: Plan, reason: str, stopper: Stopper) -> Outcome:
        if self.attempts.list:
            before = self.attempts.list[-1]["nodes"]
            if not self._hand_on(plan, before):
                attempts.set_aside(plan.run, plan.attempt, before, self.machines)
        with waiting(self.terminal, "sending the code"):
            sync_code(plan, self.machines, self.terminal.say)
            if self.script and self.script.layer:
                sync_layer(self.script.layer, self.machines, self.terminal.say)
            if file := weights.of(self.checked.settings):
                sync_weights(file, self.machines, self.terminal.say)
        self.parts.update({node.host: node for node in plan.nodes})
        self.terminal.say(
            f"run {plan.run}, attempt {plan.attempt}: {pluralize(len(plan.nodes), 'node')}, "
            f"{pluralize(plan.world_size, 'process')}"
        )
        self.attempts.begin(plan, reason, time.time(), self.last)
        logs = RunLogs(self.folder, self.terminal, plan.world_size)
        needs = dataclasses.replace(self.checked.needs, run=plan.run)
        self.owners.began(self.machines, needs)
        try:
            outcome = run_attempt(plan, self.machines, logs, stopper, self.owners)
        finally:
            self.owners.ended()
        cause = outcome.cause
        if self.script and cause:
            hint = self.script.file_hint(cause.evidence, cause.host)
            outcome = dataclasses.replace(outcome, cause=dataclasses.replace(cause, file_hint=hint))
        self.attempts.end(outcome)
        return outcome

    def _hand_on(self, plan: Plan, before: list[str]) -> bool:
        """Give node 0 the newest checkpoint of the last attempt, where none of its machines goes
        on, but their owners have them: by way of here. Returns whether that was so, and done."""
        stay = {host.name for host in self.machines.hosts} & set(before)
        hosts = [host for host in self.owners.hosts if host.name in before]
        if self.script or stay or not any(host.owner.signs for host in hosts):
            return False
        first = plan.nodes[0]

        def give(file: Path, size: int, name: str) -> None:
            attempts.set_aside(plan.run, plan.attempt, before, self.machines, handed=True)
            target = f"{first.output}/checkpoints/{first.host}/{name}"
            outputs.put(self.machines.nodes[first.host], file, size, target)

        with waiting(self.terminal, f"giving the newest checkpoint to {first.host}"):
            left = look.open_and_probe(hosts, self.checked.needs, without_missing=True)
            try:
                return collect.hand_on(left.nodes, self._folders(left), self.folder, give)
            except collect.Unwritable as error:
                raise UserError(not_copied(self.folder, error)) from None
            finally:
                left.close()

    def _folders(self, machines: OpenMachines) -> dict[str, str]:
        """Where each machine has the run."""
        facts, run = machines.facts, self.folder.name
        return {
            h.name: folder_on_machine(facts[h.name].absolute(h.node_dir), run)
            for h in machines.hosts
        }

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
        hosts, needs = self.owners.hosts, self.checked.needs
        with waiting(self.terminal, "finding out which machines answer"):
            self.machines = look.open_and_probe(hosts, needs, without_missing=True)
        here = {host.name for host in self.machines.hosts}
        for name in self.parts:
            if name not in here:
                self.terminal.say(f"{name} does not answer: its records stay on it")

    def _collect(self) -> tuple[bool, bool]:
        """Bring the files here. Returns whether a checkpoint was saved anywhere, and whether this
        machine has all that it should."""
        own = self._folders(self.machines)
        there = {name: own[name] for name in own if name in self.parts}
        nodes, attempts, whole = self.machines.nodes, self.attempts.list, True
        with waiting(self.terminal, "copying records and checkpoints to this machine"):
            held = {} if self.script else collect.checkpoints(nodes, there)
            try:
                said = collect.bring(nodes, there, attempts, self.folder, self.most)
                if self.script:
                    names, sent = self.script.outputs, code.current(self.script.folder).stats()
                    most = self.most if names else MOST_BYTES
                    said += outputs.bring(nodes, there, names, self.folder, most, sent)
                else:
                    paths, more = collect.best_and_last(held, nodes, there, self.folder)
                    said += [*more, *(f"checkpoint {relative(path)}" for path in paths)]
                if self.attempts.status == "finished" and not self.script:
                    first, files = attempts[-1]["nodes"][0], results(self.checked.options)
                    more, whole = collect.bring_results(nodes, there, first, files, self.folder)
                    said += more
            except collect.Unwritable as error:
                said, whole = [not_copied(self.folder, error)], False
        self.attempts.read_resumed(self.folder)
        for line in said:
            self.terminal.say(line)
        saved = any(map(collect.newest, held.values())) or self.attempts.saved(self.folder)
        return saved or self.script is not None, whole


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
