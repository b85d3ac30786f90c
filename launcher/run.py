"""A run from its first attempt to its report."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher import code, collect, inventory, preflight
from launcher import plan as planning
from launcher.attempts import Attempts, write_json
from launcher.errors import UserError
from launcher.inventory import CHECKOUT, Host
from launcher.lines import RunLogs, Terminal
from launcher.options import Options, trainer_settings
from launcher.plan import Plan
from launcher.preflight import Machines
from launcher.watch import Outcome, Watch

RUNS = CHECKOUT / "runs"
LOCAL_GUARD_PYTHON = sys.executable
GUARD_PYTHON = "/usr/bin/python3"
STOPPED = 75


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tandem: {text}", flush=True)


@dataclass
class Prepared:
    """All that was asked and found before anything is started."""

    options: Options
    settings: dict
    hosts: list[Host]
    machines: Machines


def prepare(options: Options) -> Prepared:
    """Look at everything, change nothing. Raises UserError."""
    settings = trainer_settings(options)
    hosts = preflight.select(inventory.load(Path(options.inventory)), options)
    machines = preflight.look(hosts, options)
    try:
        for text in preflight.judge(preflight.check(machines, options), options.force):
            say(text)
    except UserError:
        machines.close()
        raise
    return Prepared(options, settings, hosts, machines)


def first_plan(prepared: Prepared, bar: bool) -> Plan:
    unix = time.time()
    run = planning.run_id(prepared.settings["model"], len(prepared.hosts), unix)
    return planning.build(
        prepared.machines.hosts,
        prepared.machines.facts,
        prepared.options,
        prepared.settings,
        code.current(),
        run=run,
        unix=unix,
        bar=bar,
    )


def dry_run(options: Options) -> int:
    prepared = prepare(options)
    try:
        print(planning.render(first_plan(prepared, sys.stdout.isatty())))
    finally:
        prepared.machines.close()
    return 0


def train(options: Options) -> int:
    """Start a run and stay with it until its report is printed. Returns the exit code."""
    prepared = prepare(options)
    terminal = Terminal()
    try:
        plan = first_plan(prepared, terminal.is_tty)
        folder = open_run(plan)
        return Run(prepared, plan, folder, terminal).carry_out()
    finally:
        prepared.machines.close()


def open_run(plan: Plan) -> Path:
    folder = RUNS / plan.run
    folder.mkdir(parents=True)
    write_json(folder / "plan.json", plan.document())
    latest = RUNS / "latest"
    fresh = RUNS / f".latest.{plan.run}"
    fresh.symlink_to(plan.run)
    fresh.replace(latest)
    return folder


class Run:
    """One run: its attempts, then its files and its report."""

    def __init__(self, prepared: Prepared, plan: Plan, folder: Path, terminal: Terminal):
        self.prepared = prepared
        self.plan = plan
        self.folder = folder
        self.terminal = terminal
        self.attempts = Attempts(folder)

    def carry_out(self) -> int:
        sync_code(self.plan, self.prepared.machines)
        say(f"run {self.plan.run}: {len(self.plan.nodes)} nodes, {self.plan.world_size} processes")
        outcome = self._attempt(self.plan, "first attempt")
        self.attempts.close(outcome.status)
        self._tell(outcome)
        self._collect()
        self._report()
        return exit_code(outcome)

    def _attempt(self, plan: Plan, reason: str) -> Outcome:
        self.attempts.begin(plan, reason, time.time(), resumed_samples=0)
        logs = RunLogs(self.folder, self.terminal, plan.world_size)
        processes = start_guards(plan, self.prepared.machines)
        try:
            watch = Watch(plan, processes, logs, say)
            with stopping(watch):
                outcome = watch.run()
        finally:
            logs.close()
            for process in processes.values():
                process.close()
        self.attempts.end(outcome)
        return outcome

    def _tell(self, outcome: Outcome) -> None:
        if outcome.status == "failed":
            for line in describe(self.attempts.list[-1]["first_cause"]):
                say(line)
        if outcome.status != "finished":
            for line in proof(outcome):
                say(line)

    def _collect(self) -> None:
        machines = self.prepared.machines
        hosts = {host.name: host for host in machines.hosts}
        problems = collect.records(self.plan, hosts, self.folder)
        paths, more = collect.best_and_last(machines.nodes, self.plan, hosts, self.folder)
        for problem in [*problems, *more]:
            say(problem)
        for path in paths:
            say(f"checkpoint {relative(path)}")

    def _report(self) -> None:
        subprocess.run(
            [sys.executable, "-m", "report", str(relative(self.folder))], cwd=CHECKOUT, check=False
        )
        say(f"all of it lies in {relative(self.folder)}")


def sync_code(plan: Plan, machines: Machines) -> None:
    """Send the code to the machines whose tree differs."""
    now = code.current()
    stale = [h for h in machines.hosts if machines.facts[h.name].code_sha256 != now.sha256]
    folders = {node.host: node.cwd for node in plan.nodes}
    if stale:
        say(f"code {now.sha256[:12]} goes to {', '.join(host.name for host in stale)}")
        code.send(now, stale, folders)


def guard_argv(plan: Plan, node: planning.NodePlan) -> list[str]:
    python = LOCAL_GUARD_PYTHON if node.connection == "local" else GUARD_PYTHON
    return [python, "-IB", f"{node.cwd}/launcher/node", plan.unit]


def start_guards(plan: Plan, machines: Machines) -> dict:
    """A guard on each node, all at once; they wait for their task."""

    def one(node: planning.NodePlan):
        return machines.nodes[node.host].start(guard_argv(plan, node))

    with ThreadPoolExecutor(max_workers=min(64, len(plan.nodes))) as pool:
        return dict(zip([node.host for node in plan.nodes], pool.map(one, plan.nodes)))


@contextlib.contextmanager
def stopping(watch: Watch):
    """Ctrl-C, SIGTERM and a closed terminal end the run in order."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, watch.ask_stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(cause: dict) -> list[str]:
    """The first cause for people."""
    lines = [f"{cause['message']}.", f"What to do: {cause['remedy']}."]
    if cause["last_lines"]:
        lines += ["Its last lines:", *(f"  {line}" for line in cause["last_lines"])]
    return lines


def proof(outcome: Outcome) -> list[str]:
    """What each node's guard says is left of the run there."""
    lines = []
    for host, frame in outcome.exits.items():
        left = ", ".join(f"{p['pid']} {p['command']}" for p in frame["left"])
        ended = len(frame["ended"])
        lines.append(
            f"{host}: left alive: {left}" if left else f"{host}: nothing left ({ended} killed)"
        )
    for host in outcome.gone:
        lines.append(f"{host}: does not answer; its guard ends its part by itself")
    for host in outcome.lingering:
        lines.append(f"{host}: its guard was lost; the machine ends its part within 10 s")
    return lines


def exit_code(outcome: Outcome) -> int:
    if outcome.status == "finished":
        return 0
    if outcome.status == "stopped":
        return STOPPED
    cause = outcome.cause
    if cause is not None and cause.signal:
        return 128 + getattr(signal, cause.signal, signal.SIGKILL)
    return cause.exit_code or 1 if cause is not None else 1


def relative(path: Path) -> Path:
    return path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path
