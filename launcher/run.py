"""Starts and resumes runs: cli.py calls `train`, `resume` and `dry_run`. When the machines are
ready, lifecycle.py carries the run out, and is imported only then: a refusal comes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from msgspec import defstruct

from contract import seal
from contract.errors import UserError
from contract.options import DEFAULT_INVENTORY, Config, as_typed
from contract.text import clean
from launcher import folders
from launcher.machines.engine import Busy
from launcher.notify import Facts, Notify
from launcher.options import STORED, make_config, read
from launcher.participants import Moment, Waiter
from launcher.plan import plan as planning
from launcher.plan.checks import check_machines, make_plan, new_id
from launcher.programs import builder_of
from launcher.terminal import Terminal, remember_inventory

T = TypeVar("T")


def dry_run(options: Config) -> int:
    """Print the plan that a run with these options would have now. Returns the exit code. Raises
    UserError."""
    terminal = Terminal()
    checked = check_machines(options, terminal)
    try:
        name = new_id(checked)
        plan = make_plan(checked, checked.machines, run=name, columns=terminal.columns)
        terminal.drain()
        lines = [planning.render(plan, checked.machines)]
        left_out = checked.participants.select(Moment.START).left_out
        for host in checked.machines.hosts:
            if host.owner.signs:
                entry = left_out.get(host.name)
                state = f"is skipped now: {entry.message}" if entry else "participates now"
                lines.append(f"{host.name} {host.owner.describe()}; it {state}")
        print(clean("\n".join(lines)))
    finally:
        checked.machines.close()
    return 0


def train(options: Config, name: str = "") -> int:
    """Start a run and stay with it until its report is printed. `name`: the run's name, "" for a
    new one. Returns the exit code. Raises UserError."""
    terminal = Terminal()

    def try_once(waiter: Waiter) -> int:
        ready = check_machines(options, terminal, waiter)
        from launcher import lifecycle

        return lifecycle.start_run(ready, terminal, waiter, name)

    return in_turn(options, terminal, try_once)


def in_turn(options: Config, terminal: Terminal, try_once: Callable[[Waiter], T]) -> T:
    """Return what `try_once` returns. With QUEUE=1 it is called again while other runs use the
    machines. Raises UserError, Busy without QUEUE=1."""
    waiter = Waiter(terminal, Notify(options.notify, terminal), options.until)
    # `try_once` itself waits for busy machines. It raises Busy only if another launcher took one of
    # them in the moment between the question and the guard's lock.
    try:
        while True:
            try:
                return try_once(waiter)
            except Busy as error:
                if not options.queue:
                    raise
                waiter.pause(str(error))
    except UserError as error:
        if waiter.waited:  # the user may have left the terminal
            waiter.notify.send(Facts(waiter.waited, "failed", why=str(error)))
        raise


# The part of plan.json that a resumed run reads.
PLAN_OPTIONS = defstruct("PlanOptions", [("options", STORED)])


def read_begun_options(folder: Path, typed: dict[str, Any], verb: str) -> Config:
    """Return the options with which a run began. `verb`: RESUME or RUN, for the message. Raises
    UserError, also if the user has to confirm what they execute."""
    folders.refuse_links(folder)
    plan = folders.read_json(folder / "plan.json", PLAN_OPTIONS)
    began = read(plan["options"])
    if seal.holds(plan["options"], plan.get("seal")):
        return began
    # Another user may have written this plan.json. Nothing in it is executed, on the control node
    # or on machines, unless this user has typed it, too.
    typed_names = {*typed, *make_config(typed).trainer}
    executed = builder_of(began).executed_options(began)
    untyped = [text for key, text in executed.items() if key not in typed_names]
    if began.inventory != DEFAULT_INVENTORY and "inventory" not in typed:
        untyped.insert(0, as_typed("INVENTORY", began.inventory))
    if untyped:
        raise UserError(
            f"run {folder.name} was not begun by you and from here, or its plan.json was changed "
            f"since. To continue it would carry out {', '.join(untyped)}. If that is what you "
            f"want, type it with {verb}."
        )
    return began


def resume(name: str, typed: dict[str, Any]) -> int:
    """Resume a run whose launcher has ended or died. `typed`: options by name. Returns the exit
    code. Raises UserError."""
    folder = folders.find(name)
    began = read_begun_options(folder, typed, "RESUME")
    from launcher.watch.attempts import Attempts  # imported here, so that `train` refuses sooner

    decided = Attempts(folder).read_decisions()
    options: Config = builder_of(began).resume_config(began, typed)
    remember_inventory(options.inventory)
    terminal = Terminal()

    def try_once(waiter: Waiter) -> int:
        ready = check_machines(options, terminal, waiter, folder.name, decided)
        from launcher import lifecycle

        return lifecycle.resume_run(folder, ready, terminal, waiter)

    return in_turn(options, terminal, try_once)
