"""Checks a run's program on the machine of node 0, before any rank starts: as the run's user, and
in the environment and folder of a rank."""

from __future__ import annotations

from msgspec import Struct

from boundary.schema import Invalid, Text
from contract.errors import UserError
from launcher.look import OpenMachines
from launcher.plan.plan import Plan
from launcher.remote import MARK, ask
from launcher.terminal import Terminal, waiting

CHECK_SECONDS = 120.0
SHOWN_LINES = 5


class Answer(Struct):
    """The exit code of a check, None if it did not end in time, and the lines that it printed."""

    code: int | None
    lines: list[Text]


class CheckFailed(UserError):
    """Raised with the program's own message if the run would fail."""


def run_check(plan: Plan, machines: OpenMachines, terminal: Terminal) -> None:
    """Run the plan's check, if there is one, and show what it printed. Raises CheckFailed with its
    last lines if it failed, or did not end in time."""
    if not plan.check:
        return
    node = plan.nodes[0]
    task = {
        "argv": list(plan.check),
        "cwd": node.cwd,
        "env": {**node.env, "WORLD_SIZE": str(plan.world_size)},
        "seconds": CHECK_SECONDS,
    }
    # The machine ends the check after CHECK_SECONDS; the answer may take a little longer.
    call = f"main({MARK!r}, {task!r})"
    with waiting(terminal, f"checking the program on {node.host}"):
        try:
            seconds = CHECK_SECONDS + 30
            answer = ask(machines.nodes[node.host], "launcher.node.precheck", call, Answer, seconds)
        except (OSError, Invalid) as error:
            raise UserError(f"{node.host}: the check before the run failed: {error}.") from None
    # The lines are the program's own message, so no sentence of Tandem stands before them.
    last_lines = answer.lines[-SHOWN_LINES:]
    if answer.code is None:
        raise CheckFailed(
            f"{node.host}: the check before the run took more than {CHECK_SECONDS:.0f} s and "
            f"was stopped. Its last lines: {' / '.join(last_lines) or 'none'}."
        )
    if answer.code:
        raise CheckFailed(
            *(last_lines or [f"{node.host}: the check ended with exit code {answer.code}."])
        )
    terminal.say(*answer.lines)
