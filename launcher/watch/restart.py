"""When a run that failed starts again, and with which machines.

The rule: each machine keeps its batch, so with fewer machines the global batch is smaller and an
epoch has more steps. The schedule counts images, not steps, and continues from the checkpoint; the
learning rate follows the global batch where --lr_batch was given, and stays the same otherwise.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from contract.errors import UserError
from launcher.machines.connection import talk
from launcher.machines.engine import Host, MachineError
from launcher.options import Options
from launcher.plan import preflight
from launcher.plan.preflight import OpenMachines, Requirements
from launcher.stopper import Stopper
from launcher.watch import failures
from launcher.watch.failures import Restart
from launcher.watch.watch import Outcome

LARGEST_DIVISOR = 64
# Machines are given this long to come back when fewer than MIN_NODES answer.
PATIENCE = 90.0
LOOK_EVERY = 3.0


@dataclass(frozen=True)
class Limits:
    """The restarts that the user allowed and that are left."""

    restarts: int
    min_nodes: int
    divisor: int = 1

    @classmethod
    def of(cls, options: Options, nodes: int) -> Limits:
        return cls(options.max_restarts, options.min_nodes or nodes)

    def environment(self) -> dict[str, str]:
        return {"TANDEM_MICRO_BATCH_DIVISOR": str(self.divisor)} if self.divisor > 1 else {}


def decide(outcome: Outcome, limits: Limits) -> tuple[Limits, str] | None:
    """The limits of the next attempt and why there is one; None when the run is over."""
    cause = outcome.cause
    if outcome.status != "failed" or cause is None:
        return None
    restart = failures.restart(cause)
    if restart is Restart.IN_SMALLER_PIECES and limits.divisor < LARGEST_DIVISOR:
        left = replace(limits, divisor=limits.divisor * 2)
    elif restart is not Restart.SAME_AGAIN and limits.restarts > 0:
        left = replace(limits, restarts=limits.restarts - 1)
    else:
        return None
    return left, failures.reason(cause, left.divisor)


def survivors(
    hosts: list[Host], asked: Requirements, limits: Limits, stopper: Stopper
) -> OpenMachines:
    """Connections to the machines that are fit now, at least MIN_NODES. Raises UserError."""
    deadline = time.monotonic() + PATIENCE
    while True:
        machines = preflight.inspect(hosts, asked, without_missing=True)
        reasons = {host.name: _unfit(host, machines, asked) for host in machines.hosts}
        unfit = {name: why for name, why in reasons.items() if why is not None}
        fit = [host for host in machines.hosts if host.name not in unfit]
        for name in unfit:
            machines.facts.pop(name)
        machines.hosts = fit
        if len(fit) >= limits.min_nodes:
            return machines
        if stopper.asked or time.monotonic() > deadline:
            machines.close()
            names = ", ".join(host.name for host in fit) or "none"
            raise UserError(
                *unfit.values(),
                f"only {len(fit)} machines answer and are fit ({names}), and MIN_NODES is "
                f"{limits.min_nodes}: mend the others, then `make train RESUME=latest`.",
            )
        machines.close()
        time.sleep(LOOK_EVERY)


def _unfit(host: Host, machines: OpenMachines, asked: Requirements) -> str | None:
    """Why a machine cannot take part; None if it can."""
    one = OpenMachines([host], machines.nodes, {host.name: machines.facts[host.name]})
    return next((p.text for p in preflight.check(one, asked) if p.fatal), None)


def set_aside(run: str, attempt: int, before: list[str], machines: OpenMachines) -> None:
    """Hide from the trainer the checkpoints of machines that have come back.

    `before` names the machines of the attempt before. What others hold may be newer than the point
    from which those went on without them: resuming from it would skip the images that those have
    trained on since. Raises MachineError.
    """
    if not any(host.name in before for host in machines.hosts):
        return
    script = 'test ! -e "$1" || { mkdir -p "$2" && mv "$1" "$2/before-attempt-$3"; }'
    for host in machines.hosts:
        if host.name in before:
            continue
        output = f"{machines.facts[host.name].absolute(host.node_dir)}/runs/{run}"
        held, aside = f"{output}/checkpoints/{host.name}", f"{output}/abandoned/{host.name}"
        argv = ["sh", "-c", script, "sh", held, aside, str(attempt)]
        _, said, status = talk(machines.nodes[host.name].start(argv), b"", 20.0)
        if status != 0:
            message = f"{host.label()}: {held} could not be moved to {aside}: {said}"
            raise MachineError([host.name], message)
