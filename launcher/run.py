"""Starts and resumes runs, until their machines are ready. It imports lifecycle.py only then, so
that a refusal comes at once."""

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
from launcher.options import STORED, config_of, read
from launcher.participants import Moment, Waiter
from launcher.plan import plan as planning
from launcher.plan.checks import check_machines, make_plan, new_id
from launcher.programs import executes, resume_config
from launcher.terminal import Terminal, keep_machines

T = TypeVar("T")


def dry_run(options: Config) -> int:
    terminal = Terminal()
    checked = check_machines(options, terminal)
    try:
        name = new_id(checked)
        plan = make_plan(checked, checked.machines, run=name, bar=terminal.columns)
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
    """Start a run, of this name if it is given one, and stay with it until its report is printed.
    Returns the exit code."""
    terminal = Terminal()

    def once(waiter: Waiter) -> int:
        ready = check_machines(options, terminal, waiter)
        from launcher import lifecycle

        return lifecycle.begin(ready, terminal, waiter, name)

    return in_turn(options, terminal, once)


def in_turn(options: Config, terminal: Terminal, once: Callable[[Waiter], T]) -> T:
    """Return what `once` returns. With QUEUE=1 it is called again while others use the machines.
    Raises UserError, Busy without QUEUE=1."""
    waiter = Waiter(terminal, Notify(options.notify, terminal), options.until)
    # `once` has waited for machines that were busy. Busy comes out of it if another launcher took
    # one of them in the moment between the question and the guard's lock.
    try:
        while True:
            try:
                return once(waiter)
            except Busy as error:
                if not options.queue:
                    raise
                waiter.pause(str(error))
    except UserError as error:
        if waiter.waited:  # nobody need be there to read it
            waiter.notify.send(Facts(waiter.waited, "failed", why=str(error)))
        raise


# The part of plan.json that a resumed run reads.
PLANNED = defstruct("Planned", [("options", STORED)])


def began_as(folder: Path, typed: dict[str, Any], verb: str) -> Config:
    """Return the options with which a run began, for `verb` to carry out. Raises UserError."""
    folders.refuse_links(folder)
    planned = folders.recorded(folder / "plan.json", PLANNED)
    began = read(planned["options"])
    if seal.holds(planned["options"], planned.get("seal")):
        return began
    # This user has not written that plan.json, so nothing in it is executed, here or on machines,
    # unless the user has typed it.
    typed_names = {*typed, *config_of(typed).trainer}
    unnamed = [text for key, text in executes(began).items() if key not in typed_names]
    if began.inventory != DEFAULT_INVENTORY and "inventory" not in typed:
        unnamed.insert(0, as_typed("INVENTORY", began.inventory))
    if unnamed:
        raise UserError(
            f"run {folder.name} was not begun by you and from here, or its plan.json was changed "
            f"since. To continue it would carry out {', '.join(unnamed)}. If that is what you "
            f"want, type it with {verb}."
        )
    return began


def resume(name: str, typed: dict[str, Any]) -> int:
    """Resume a run whose controller has ended, however that happened. `typed`: options by name.
    Returns the exit code. Raises UserError."""
    folder = folders.find(name)
    began = began_as(folder, typed, "RESUME")
    from launcher.watch.attempts import Attempts  # which a new run needs only later

    decided = Attempts(folder).decided()
    options = resume_config(began, typed)
    keep_machines(options.inventory)
    terminal = Terminal()

    def once(waiter: Waiter) -> int:
        ready = check_machines(options, terminal, waiter, folder.name, decided)
        from launcher import lifecycle

        return lifecycle.go_on(folder, ready, terminal, waiter)

    return in_turn(options, terminal, once)
