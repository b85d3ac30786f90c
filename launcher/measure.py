"""`make plan`: predicts a run from the newest run of its model, by `python -m report plan`. If
there is none, it claims the machines as a run does, and measures the links between them at full
load. Then each machine trains for some seconds without the others."""

from __future__ import annotations

import dataclasses
import json
import secrets
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from boundary.answers import NodeFacts
from contract.decisions import OFF
from contract.errors import UserError
from contract.options import RESULTS, Config
from contract.runs import MEASURED
from contract.text import pluralize
from launcher import build_trainer, collect, folders
from launcher.background import MIB
from launcher.errand import perform_errand
from launcher.folders import relative
from launcher.machines import inventory
from launcher.machines.engine import Host
from launcher.machines.inventory import CHECKOUT
from launcher.participants import Waiter
from launcher.plan import devices
from launcher.plan.checks import check_machines, make_plan, new_id
from launcher.plan.plan import NodePlan, Plan, choose_interface, choose_port
from launcher.plan.sending import with_layer
from launcher.programs import build_program
from launcher.run import in_turn
from launcher.terminal import Terminal
from launcher.watch.attempts import explain_uncopied_files

TRAIN_SECONDS = 15  # for which each machine trains alone
LINKS = ("links.json",)  # the record of a machine with its measured links
NOTHING_MEASURED = 3  # the report's exit code if there is nothing to predict from


def plan(options: Config, words: list[str], measures_again: bool) -> int:
    """Predict a run with these options and show the prediction. `words` go to the report; with
    `measures_again` the machines are measured even if an earlier run is known. Returns the exit
    code. Raises UserError."""
    terminal = Terminal()
    request = build_program(options).request
    assert request
    words = [*words, "--model", request.model]
    if request.image_size is not None:
        words += ["--image-size", str(request.image_size)]
    words += ["--warmup", str(request.phases.warmup), "--optimizer", request.optimizer]
    words += ["--warmup-chosen"] if request.phases.chosen else []
    # A prediction from an earlier run needs no machines, so this error is raised only if machines
    # have to be measured. An inventory that exists, or that the user named, must be usable.
    hosts: list[Host] = []
    inventory_error: UserError | None = None
    file = Path(options.inventory)
    try:
        hosts = inventory.select(inventory.load(file), options)
    except UserError as error:
        is_missing = not file.exists() and options.inventory == Config.inventory
        if isinstance(error, inventory.Unusable) and not is_missing:
            raise
        inventory_error = error
    count = options.nodes or len(hosts)
    words += ["--nodes", str(count)] if count else []
    if hosts:
        words += ["--machines", ",".join(host.name for host in hosts)]
    # Also with MEASURE=1 the report comes first: what it refuses need not be measured.
    done = run_report_plan(words)
    is_known = done.returncode == 0 and not measures_again
    if is_known or done.returncode not in (0, NOTHING_MEASURED):
        return show_report(done, terminal)
    if inventory_error is not None:
        raise inventory_error
    folder = in_turn(options, terminal, lambda waiter: measure(options, terminal, waiter))
    return show_report(run_report_plan([*words, "--run", str(relative(folder))]), terminal)


def run_report_plan(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `python -m report plan` with these words, which makes a prediction from files of runs."""
    argv = [sys.executable, "-m", "report", "plan", "--runs", str(relative(folders.RUNS)), *words]
    return subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=False)


def show_report(done: subprocess.CompletedProcess[str], terminal: Terminal) -> int:
    """Print what the report printed, and return its exit code."""
    if done.stdout:
        terminal.lines(done.stdout.splitlines())
    terminal.drain()
    sys.stderr.write(done.stderr)
    return done.returncode


def measure(options: Config, terminal: Terminal, waiter: Waiter) -> Path:
    """Claim the machines, measure, and release them. Returns the folder of the measurement. Raises
    UserError."""
    # Each machine trains by itself, with a whole BATCH: nothing balances the batches.
    checked = check_machines(dataclasses.replace(options, balance=OFF), terminal, waiter)
    machines = checked.machines
    try:
        folder = folders.make_folder(folders.RUNS / MEASURED, new_id(checked))
        # A machine that trains alone would decide its precision alone. So that the figures hold for
        # a run, all machines use the precision on which the ranks of a run would agree.
        level = devices.choose_precision(checked.program, machines, None)
        precision = level.name if level else "auto"
        # Steps take the same time with any weights, so none are sent. The recipe's options are
        # written out, and the recipe is omitted, because it might name weights.
        typed = build_trainer.collect_trainer_options(checked.config)
        trial = {name: v for name, v in typed.items() if name not in ("weights", *RESULTS)}
        trial |= {"config": "{}", "trial": TRAIN_SECONDS, "precision": precision}
        config = dataclasses.replace(checked.config, trainer=trial)
        program = with_layer(build_program(config), machines)
        needs = dataclasses.replace(checked.needs, config=config, program=program)
        timetables = make_timetables(machines.hosts, machines.facts)
        ready = dataclasses.replace(checked, needs=needs)
        plan = make_plan(ready, machines, run=folder.name)
        plan = separate_nodes(plan, machines.facts, timetables)
        links = "the links between them, then " if timetables else ""
        announcement = (
            f"measuring {pluralize(len(plan.nodes), 'machine')}: {links}{TRAIN_SECONDS} s of "
            f"{program.name} on each of them alone"
        )
        attempts = perform_errand(folder, plan, machines, terminal, announcement, "measured")
        outputs, max_bytes = {node.host: node.output for node in plan.nodes}, config.keep * MIB
        problems = collect.fetch_records(
            machines.nodes, outputs, attempts.list, folder, max_bytes, LINKS
        )
        if problems:
            raise UserError(*problems)
    except collect.Unwritable as error:
        raise UserError(explain_uncopied_files(folder, error)) from None
    finally:
        machines.close()
    return folder


def separate_nodes(
    plan: Plan, facts: dict[str, NodeFacts], timetables: dict[str, dict[str, Any]]
) -> Plan:
    """Return the plan in which each machine trains alone. A machine with a timetable first measures
    its links."""
    nodes: list[NodePlan] = []
    used_ports = defaultdict[str, set[int]](set)  # by machine: two nodes may be on one PC
    for node in plan.nodes:
        machine = facts[node.host].machine
        port = choose_port(facts[node.host], None, used_ports[machine])
        used_ports[machine].add(port)
        world = {"--nnodes": "1", "--node_rank": "0"}
        world |= {"--master_addr": node.address, "--master_port": str(port)}
        # The command stays that of a run, so that the figures hold for a run. Only words such as
        # --nnodes=4 change.
        names = [word.partition("=")[0] for word in node.argv]
        argv = [
            f"{name}={world[name]}" if name in world else word
            for name, word in zip(names, node.argv)
        ]
        env = dict(node.env)
        if node.host in timetables:
            env["TANDEM_LINKS"] = json.dumps(timetables[node.host])
            figures = f"{node.output}/nodes/{node.host}/links.json"
            argv = [argv[0], "-m", "launcher.node.pairprobe", figures, *argv]
        ranks = tuple(range(len(node.ranks)))  # each node has a rank 0 of its own
        nodes.append(dataclasses.replace(node, ranks=ranks, argv=tuple(argv), env=env))
    return dataclasses.replace(plan, nodes=tuple(nodes))


STREAM = {"seconds": 1.0}  # options of launcher/node/pairprobe.py: how long each stream lasts
PATIENCE = 60.0  # seconds to wait for a partner; guards start within a second of each other


def make_timetables(hosts: list[Host], facts: dict[str, NodeFacts]) -> dict[str, dict[str, Any]]:
    """Return each machine's plan for launcher/node/pairprobe.py; {} if no cable is between them.
    Each pair of machines measures its link, in rounds of pairs that share no cable. Then all
    machines send at once. Raises UserError if no port is free on all machines."""
    # Nodes with one address are on one PC, and no cable is between them.
    if len({host.address for host in hosts}) < len(hosts) or len(hosts) < 2:
        return {}
    ports = set.intersection(*(set(facts[host.name].free_ports) for host in hosts))
    if not ports:
        raise UserError("no port is free on all of these machines: end programs that listen there.")
    # The token keeps connections of other programs from being measured.
    common = {
        "peers": {host.name: host.address for host in hosts},
        "port": max(ports),
        "token": secrets.token_urlsafe(),
        **STREAM,
        "patience": PATIENCE,
    }
    names = [host.name for host in hosts]
    return {
        host.name: {
            **common,
            "host": host.name,
            "address": host.address,
            "interface": choose_interface(host, facts[host.name]) or "",
            "rounds": make_rounds(names, host.name),
        }
        for host in hosts
    }


def make_rounds(names: list[str], name: str) -> list[dict[str, Any] | None]:
    """Return what the machine `name` does in each round, by the circle method of tournaments; None
    for a round in which it rests."""
    # [a, b, c, d] plays a-d and b-c; then all but a move on by one: [a, d, b, c] plays a-c and d-b.
    # With an odd number, whoever plays against "" rests.
    index, rounds = names.index(name), []
    circle = [*names, *[""] * (len(names) % 2)]
    for _ in circle[1:]:
        partner = circle[-1 - circle.index(name)]
        role = "client" if partner in names[index:] else "server"
        rounds.append({"role": role, "partner": partner} if partner else None)
        circle = [circle[0], circle[-1], *circle[1:-1]]
    # In the last round all machines send at once, each to the next machine.
    following, previous = names[(index + 1) % len(names)], names[index - 1]
    ring = {"role": "ring", "partner": following, "before": previous, "first": index == 0}
    return [*rounds, ring]
