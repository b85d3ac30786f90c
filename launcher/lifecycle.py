"""Carries out a run on machines that are ready, from its folder to its report. run.py calls
`start_run` and `resume_run`; watch/ carries out the single attempt. The functions stand in the
order of a run: prepare, attempts, the decision on a restart, the next attempt, copying, report.

Each machine keeps its batch, so with fewer machines the global batch is smaller and an epoch has
more steps. The schedule counts images, not steps, and continues from the checkpoint. With
--lr_batch the learning rate follows the global batch; otherwise it stays the same.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from contract import seal
from contract.errors import BAD_INPUT, UserError
from contract.text import pluralize
from launcher import collect, folders, hours, look, outputs
from launcher.background import MIB
from launcher.folders import relative
from launcher.handover import find_checkpoint, place_checkpoints
from launcher.look import OpenMachines
from launcher.machines.engine import Busy, MachineError
from launcher.machines.inventory import CHECKOUT
from launcher.notify import Notify, read_facts
from launcher.participants import Moment, Participants, Waiter
from launcher.plan.checks import ReadyRun, make_plan, new_id
from launcher.plan.files import MAX_BYTES
from launcher.plan.plan import Plan
from launcher.plan.sending import deliveries, explain_missing_file
from launcher.precheck import CheckFailed, run_check
from launcher.problems import BUSY_REMEDY
from launcher.program import Needs
from launcher.site import RunSite, folders_of
from launcher.terminal import Stopper, Terminal, waiting
from launcher.watch import failures
from launcher.watch.attempts import (
    Attempts,
    Outcome,
    choose_exit_code,
    describe_cause,
    describe_leftovers,
    explain_how_to_resume,
    explain_missing_resume_args,
    explain_uncopied_files,
    write_json,
)
from launcher.watch.failures import Failure, Restart
from launcher.watch.guards import deliver, lay_out, start_guards
from launcher.watch.lines import RunLogs
from launcher.watch.watch import Watch

LARGEST_DIVISOR = 64  # up to which Limits.divisor doubles


@dataclass(frozen=True)
class Run:
    """The facts of a run from its first attempt to its report; only `attempts` changes. `lock`
    keeps other launchers away. `status_before`, `count_before`: the run's status and its number of
    attempts before this process took control; "running" and 0 for a new run."""

    folder: Path
    ready: ReadyRun
    terminal: Terminal
    notify: Notify
    attempts: Attempts
    status_before: str
    count_before: int
    lock: TextIO

    @property
    def participants(self) -> Participants:
        return self.ready.participants

    def site(self, machines: OpenMachines, needs: Needs) -> RunSite:
        """Return what handover.py needs of the run, with these connections."""
        hosts = self.participants.hosts
        return RunSite(self.folder, needs, hosts, machines, self.attempts, self.terminal)


@dataclass(frozen=True)
class Limits:
    """The restarts that a run may still make, by MAX_RESTARTS. `divisor`: after attempts that were
    out of memory, the micro-batches of the next attempt are 1/divisor of a step's batch."""

    restarts: int
    divisor: int = 1

    def environment(self) -> dict[str, str]:
        """Return the variables by which the ranks know these limits."""
        return {"TANDEM_MICRO_BATCH_DIVISOR": str(self.divisor)} if self.divisor > 1 else {}


@dataclass(frozen=True)
class PlannedAttempt:
    """An attempt that is about to start. `reason`: why, for people. `checkpoint`: the name that
    replaces {last} in RESUME_ARGS, if there is any."""

    plan: Plan
    needs: Needs
    machines: OpenMachines
    reason: str
    limits: Limits
    checkpoint: str | None = None


# ---- prepare ----


def start_run(ready: ReadyRun, terminal: Terminal, waiter: Waiter, name: str = "") -> int:
    """Carry out a new run and return the exit code. Raises UserError. After Busy the run has no
    folder any more: another launcher had also found the machines free, and started first."""
    folder, previous_latest = None, (folders.RUNS / "latest").resolve()
    try:
        folder = folders.make_folder(folders.RUNS, name or new_id(ready))
        plan = make_plan(ready, ready.machines, run=folder.name, columns=terminal.columns)
        with folders.writing(folder / "plan.json"):
            # The plan holds the diff of the checkout and each machine's run_env, which are private.
            document = plan.document()
            # By the seal, RESUME knows that this user wrote the options.
            document["seal"] = seal.seal(document["options"])
            write_json(folder / "plan.json", document, mode=0o600)
        run = take_control(folder, ready, terminal)
        waiter.waited = ""  # from here on the run sends its own notifications
        return run_to_end(run, plan, "first attempt")
    except BaseException as error:
        ready.machines.close()
        # A folder without an attempt would be taken for a run that failed.
        nothing_began = isinstance(error, (Busy, CheckFailed))
        if folder and (nothing_began or not (folder / "plan.json").exists()):
            terminal.close_log()
            folders.remove_folder(folder, previous_latest)
        raise


def resume_run(folder: Path, ready: ReadyRun, terminal: Terminal, waiter: Waiter) -> int:
    """Carry out a run that was begun before and return the exit code. Raises UserError; after Busy
    the run is as it was."""
    run = None
    try:
        run = take_control(folder, ready, terminal)
        number = run.attempts.close_broken() + 1
        checkpoint = find_checkpoint(run.site(ready.machines, ready.needs))
        plan = make_plan(
            ready,
            ready.machines,
            checkpoint=checkpoint,
            run=folder.name,
            attempt=number,
            used_ports=run.attempts.used_ports,
            columns=terminal.columns,
        )
        waiter.waited = ""  # from here on the run sends its own notifications
        return run_to_end(run, plan, "resumed by hand", checkpoint)
    except BaseException as error:
        ready.machines.close()
        # With QUEUE=1 the run is resumed again after Busy, and then takes the lock anew.
        if run and isinstance(error, (Busy, CheckFailed)):
            terminal.close_log()
            run.lock.close()
        raise


def take_control(folder: Path, ready: ReadyRun, terminal: Terminal) -> Run:
    """Take control of the run for this process. Raises UserError if another process has it."""
    notify = Notify(ready.config.notify, terminal)
    # The lock comes first: until then another launcher may write the attempts.
    lock, attempts = folders.lock(folder), Attempts(folder)
    status, count = attempts.status, len(attempts.list)
    return Run(folder, ready, terminal, notify, attempts, status, count, lock)


def run_to_end(run: Run, plan: Plan, reason: str, checkpoint: str | None = None) -> int:
    """Make all attempts, the first by this plan; copy the files to the control node, report and
    notify. Returns the exit code. Raises UserError if no attempt began."""
    needs = dataclasses.replace(run.ready.needs, run=plan.run)
    limits, machines = Limits(run.ready.config.max_restarts), run.ready.machines
    # `checkpoint` is "" if the program finds its checkpoint itself (handover.find_checkpoint).
    first_attempt = PlannedAttempt(plan, needs, machines, reason, limits, checkpoint or None)
    try:
        # From here on the terminal's lines are kept: `make attach` may come at any time.
        run.terminal.open_log(run.folder / "controller.log")
        folders.point_latest(run.folder)
        outcome, connected = run_attempts(run, first_attempt)
        is_complete = finish_run(run, outcome, connected)
    except UserError as error:
        # After Busy nothing has failed: with QUEUE=1 the launcher waits and starts the run again.
        if not isinstance(error, Busy):
            run.notify.send(read_facts(run.folder, "failed", str(error)))
        raise
    # attempts.json has the cause in words, with the remedy that suits this run.
    cause = run.attempts.list[-1]["first_cause"] if outcome.cause else None
    run.notify.send(read_facts(run.folder, outcome.status, cause and cause["message"]))
    return choose_exit_code(outcome, is_complete)


# ---- attempts ----


def run_attempts(run: Run, attempt: PlannedAttempt) -> tuple[Outcome, OpenMachines | None]:
    """Make attempt after attempt. Returns the outcome of the last one, and the connections that are
    still open, None if there are none. Raises UserError if the first attempt did not begin."""
    with (
        Stopper().listening() as stopper,
        hours.end_at(run.ready.config.until, run.terminal),
        run.participants.looking(),
    ):
        while True:
            try:
                outcome = perform_attempt(run, attempt, stopper)
            except UserError as error:
                # A later attempt that could not begin leaves the checkpoints of the earlier ones,
                # which are worth copying.
                if attempt.plan.attempt == 1 or stopper.stop_requests:
                    run.attempts.close("failed")
                    attempt.machines.close()
                    raise
                run.terminal.say(*error.problems)
                failed = Outcome("failed", cause=None, wall_seconds=0.0, lost_hosts=[], exits={})
                return failed, attempt.machines
            cause = outcome.cause
            # If another launcher took a machine after the machine had answered, this run has not
            # begun.
            is_first = len(run.attempts.list) == run.count_before + 1
            if is_first and cause is not None and cause.source == "busy":
                run.attempts.close(run.status_before)
                raise Busy(f"{cause.host}: {cause.message}: {BUSY_REMEDY}.")
            if cause is not None:
                run.terminal.say(*describe_cause(run.attempts.list[-1]["first_cause"]))
            if outcome.status != "finished":
                run.terminal.say(*outcome.silent_ranks, *describe_leftovers(outcome))
            can_resume = run.ready.program.resume is not None
            decision = decide_restart(outcome, attempt.limits, can_resume)
            if decision is None or stopper.stop_requests:
                return outcome, attempt.machines
            limits, reason = decision
            run.terminal.say(f"starting again: {reason}")
            try:
                attempt = plan_next_attempt(run, attempt, limits, reason, stopper)
            except UserError as error:
                run.terminal.say(*error.problems)
                return outcome, None


def perform_attempt(run: Run, attempt: PlannedAttempt, stopper: Stopper) -> Outcome:
    """Send the program, start the guards, and stay until all guards have ended. If machines no
    longer answer, the attempt has failed, and MAX_RESTARTS may help. Only a first attempt raises
    MachineError then, since the user is there to read why. Raises UserError."""
    plan, machines, program = attempt.plan, attempt.machines, attempt.needs.program
    try:
        with waiting(run.terminal, "sending the code"):
            deliver(deliveries(program), machines, run.terminal.say)
        place_checkpoints(run.site(machines, attempt.needs), plan)
        if program.runs_in_folder:
            with waiting(run.terminal, "laying out the code"):
                lay_out(plan, machines, program.outputs, run.terminal.say)
        if len(run.attempts.list) == run.count_before:  # a restart need not repeat the check
            run_check(plan, machines, run.terminal)
        run.terminal.say(
            f"run {plan.run}, attempt {plan.attempt}: {pluralize(len(plan.nodes), 'node')}, "
            f"{pluralize(plan.world_size, 'process')}"
        )
        run.terminal.result(run=plan.run)
        run.attempts.begin(plan, attempt.reason, time.time(), attempt.checkpoint)
        logs = RunLogs(run.folder, run.terminal, plan.world_size)
        with run.participants.training(machines, attempt.needs):
            outcome = watch_guards(plan, machines, logs, stopper, run.participants)
    except MachineError as error:
        if plan.attempt == 1 or stopper.stop_requests:
            raise
        message = " ".join(error.problems)
        failure = Failure(host=error.hosts[0], source="gone", order=0, message=message)
        outcome = Outcome(
            "failed", cause=failure, wall_seconds=0.0, lost_hosts=error.hosts, exits={}
        )
        if run.attempts.list[-1]["attempt"] != plan.attempt:  # it failed before `begin` above
            run.attempts.begin(plan, attempt.reason, time.time())
    else:
        if cause := outcome.cause:  # a file that the rank did not find may be on the control node
            hint = explain_missing_file(program, cause.evidence, cause.host)
            cause = dataclasses.replace(cause, file_hint=hint)
            outcome = dataclasses.replace(outcome, cause=cause)
    run.attempts.end(outcome)
    return outcome


def watch_guards(
    plan: Plan,
    machines: OpenMachines,
    logs: RunLogs,
    stopper: Stopper,
    participants: Participants | None = None,
) -> Outcome:
    """Start the guards of an attempt and stay until all guards have ended. Raises MachineError."""
    processes = start_guards(plan, machines)
    try:
        return Watch(plan, processes, logs, stopper, participants).run()
    finally:
        with waiting(logs.terminal, "writing the logs to the control node's disk"):
            logs.close()
        for process in processes.values():
            process.close()


# ---- whether to start again, and with which plan ----


def decide_restart(
    outcome: Outcome, limits: Limits, can_resume: bool = True
) -> tuple[Limits, str] | None:
    """Return the limits of the next attempt and its reason; None if the run is over."""
    # The attempt saved and ended because the machines change, which is no failure.
    if outcome.regroup_reason and can_resume:
        return limits, outcome.regroup_reason
    cause = outcome.cause
    if outcome.status != "failed" or cause is None:
        return None
    # Smaller micro-batches repair a lack of memory, so they use up none of MAX_RESTARTS.
    # After SAME_AGAIN a new attempt would fail in the same way.
    restart = cause.restart
    if restart is Restart.IN_SMALLER_PIECES and limits.divisor < LARGEST_DIVISOR:
        limits = dataclasses.replace(limits, divisor=limits.divisor * 2)
    elif restart is not Restart.SAME_AGAIN and limits.restarts > 0:
        limits = dataclasses.replace(limits, restarts=limits.restarts - 1)
    else:
        return None
    return limits, failures.explain_restart(cause, limits.divisor)


def plan_next_attempt(
    run: Run, previous: PlannedAttempt, limits: Limits, reason: str, stopper: Stopper
) -> PlannedAttempt:
    """Plan the next attempt on the machines that answer. Raises UserError, after it has closed all
    connections."""
    # Machines may be gone or back by now, so all are asked again over new connections.
    previous.machines.close()
    terminal = run.terminal
    needs = dataclasses.replace(previous.needs, decided=run.attempts.read_decisions())
    # A user who reads that the run waits for machines wants to know whether steps are lost.
    saved = run.attempts.has_checkpoint(run.folder)
    lead = "the checkpoint is saved, and the run waits" if saved else "the run waits"
    waiter = Waiter(terminal, run.notify, stopper=stopper, lead=lead)
    machines = run.participants.gather(Moment.RESTART, needs, waiter, previous.plan.run)
    try:
        checkpoint = find_checkpoint(run.site(machines, needs))
        plan = make_plan(
            dataclasses.replace(run.ready, needs=needs),
            machines,
            checkpoint=checkpoint,
            run=previous.plan.run,
            attempt=previous.plan.attempt + 1,
            used_ports=run.attempts.used_ports,
            columns=terminal.columns,
            extra_env=limits.environment(),
        )
    except BaseException:
        machines.close()
        raise
    return PlannedAttempt(plan, needs, machines, reason, limits, checkpoint or None)


# ---- copy the files and report ----


def finish_run(run: Run, outcome: Outcome, machines: OpenMachines | None) -> bool:
    """Close the run, copy its files to the control node, and report. Returns whether the control
    node has all files that it should."""
    # A resumed run that did no work, or whose program refused its input, keeps its old status. The
    # old status "running" is that of a new run, or of a run whose launcher died.
    new_attempts = run.attempts.list[run.count_before :]
    is_bad_input = outcome.cause is not None and outcome.cause.exit_code == BAD_INPUT
    is_unchanged = not new_attempts or (len(new_attempts) == 1 and is_bad_input)
    was_refused = run.status_before != "running" and is_unchanged
    run.attempts.close(run.status_before if was_refused else outcome.status)
    machines = reconnect(run, outcome, machines)
    # The run is over, and its status is written: Ctrl-C ends only the copying and the report.
    try:
        has_checkpoint, is_complete = collect_files(run, machines)
        advice = explain_missing_resume_args()
        if run.ready.program.resume is not None:
            advice = explain_how_to_resume(run.folder.name, has_checkpoint, outcome.cause)
        if outcome.status != "finished":
            run.attempts.note_how_to_resume(advice)
        with waiting(run.terminal, "making the report"):
            code, lines = run_report(str(relative(run.folder)))
        if code == 0:
            run.terminal.lines(lines)
        else:  # the training is valid all the same
            reason = lines[-1] if lines else f"exit code {code}"
            run.terminal.say(
                f"the report failed ({reason}), but the run's files are complete: `make report "
                f"RUN={run.folder.name}` tries again"
            )
            is_complete = False
        run.terminal.say(f"everything is in {relative(run.folder)}")
    except KeyboardInterrupt:
        name = run.folder.name
        run.terminal.say(f"`make report RUN={name}` makes a report of the files copied so far")
        raise
    finally:
        machines.close()
    if run.attempts.problem:
        run.terminal.say(run.attempts.problem)
        is_complete = False
    if outcome.status == "stopped":
        run.terminal.say(
            "the run was stopped as requested: if make prints `Error 75`, this is not a failure"
        )
    if outcome.status != "finished":
        run.terminal.say(advice)
    run.terminal.drain()
    return is_complete


def reconnect(run: Run, outcome: Outcome, machines: OpenMachines | None) -> OpenMachines:
    """Return the same connections if all machines that participated are still connected; otherwise
    close them and connect to the machines that answer now."""
    participated = run.participants.participated
    may_be_lost = outcome.status == "failed" or bool(outcome.lost_hosts or outcome.unreported_hosts)
    if machines and not may_be_lost and participated <= {host.name for host in machines.hosts}:
        return machines
    if machines:
        machines.close()
    hosts, needs = run.participants.hosts, run.ready.needs
    with waiting(run.terminal, "finding out which machines answer"):
        machines = look.open_and_probe(hosts, needs, without_missing=True)
    for name in sorted(participated - {host.name for host in machines.hosts}):
        run.terminal.say(f"{name} does not answer: its records stay on that machine")
    return machines


def collect_files(run: Run, machines: OpenMachines) -> tuple[bool, bool]:
    """Copy the run's files to the control node. Returns whether the run can continue from a
    checkpoint on any machine, and whether the control node has all files that it should."""
    program, attempts = run.ready.program, run.attempts
    nodes, max_bytes = machines.nodes, run.ready.config.keep * MIB
    run_folders = folders_of(machines, run.folder.name)
    participated = run.participants.participated
    run_folders = {name: folder for name, folder in run_folders.items() if name in participated}
    lines: list[str] = []  # for the user
    names_by_host: dict[str, list[str]] = {}  # of the trainer's checkpoints
    is_complete = True
    with waiting(run.terminal, "copying records and checkpoints to the control node"):
        try:
            lines += collect.fetch_records(nodes, run_folders, attempts.list, run.folder, max_bytes)
            if program.runs_in_folder:
                # Without OUTPUT=, KEEP= does not apply (docs/own-script.md).
                limit = max_bytes if program.outputs else MAX_BYTES
                lines += outputs.fetch_outputs(
                    nodes, run_folders, program.outputs, run.folder, limit
                )
            # Every machine has the trainer's checkpoints, so those of one machine are enough.
            if program.ranks_pass_on:
                names_by_host = collect.list_checkpoints(nodes, run_folders)
                paths, problems = collect.fetch_best_and_newest(
                    names_by_host, nodes, run_folders, run.folder
                )
                lines += [*problems, *(f"checkpoint {relative(path)}" for path in paths)]
            if program.results and attempts.status == "finished":
                # Node 0 has the results (launcher/program.py).
                host, names = attempts.list[-1]["nodes"][0], [*program.results]
                texts, is_complete = collect.fetch_results(
                    nodes, run_folders, host, names, run.folder
                )
                lines += texts
        except collect.Unwritable as error:
            # One sentence is enough: on a full disk each further file fails for the same reason.
            lines, is_complete = [explain_uncopied_files(run.folder, error)], False
    attempts.read_starts()
    run.terminal.say(*lines)
    has_saved = bool(collect.newest_by_host(names_by_host)) or attempts.has_checkpoint(run.folder)
    # Nobody looks for a script's checkpoints here, so a script counts as having a checkpoint.
    return has_saved or not program.ranks_pass_on, is_complete


REPORT_ARGV = (sys.executable, "-m", "report")


def run_report(*words: str) -> tuple[int, list[str]]:
    """Run the report with these arguments. Returns its exit code and the lines of its output."""
    # A separate process, since the report limits its memory and its computing time.
    argv, merged = [*REPORT_ARGV, *words], subprocess.STDOUT
    done = subprocess.run(
        argv, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=merged, text=True, check=False
    )
    return done.returncode, done.stdout.splitlines()
