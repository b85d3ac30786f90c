"""Check what machines report, against the types of boundary/facts.py.

Roles call `machine` and `driver` as filters on what modules return, so that the rest of planning/
can trust the facts. A value of a wrong type, range, size or alphabet raises PlanError, which fails
only the machine that reports it.
"""

from __future__ import annotations

import re

from msgspec import to_builtins

from boundary.facts import (
    DRIVER_FIELDS,
    MAX_PRINTED,
    DriverFacts,
    MachineFacts,
    PlanFacts,
    Printed,
    Proof,
    ShellFacts,
)
from boundary.schema import Invalid, convert, decode

from . import PlanError

LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # no file can contain it as UTF-8


def machine(facts, host, address="", folders=(), gpus=None, driver_policy=""):
    """Check what module machine_facts returned. Returns its facts and four facts of the inventory.

    address: the machine's in the inventory; folders: the module's parameter; gpus and
    driver_policy: settings of the inventory. Raises PlanError.
    """
    checked = read(facts, MachineFacts, host)
    missing = [folder for folder in folders if folder not in checked.disks]
    if missing:
        raise _impossible(host, f"it says nothing of the disk of {missing[0]}")
    # Other machines send to the inventory's address, so the machine's own answer does not count.
    interface = next((link.name for link in checked.links if address in link.addresses), None)
    added = {"interface": interface, "host": host, "gpus_counted": read_gpu_count(gpus, host),
           "driver_kept": driver_policy == "keep"}  # fmt: skip
    # `driver` returns the facts in DRIVER_FIELDS, which have only their defaults here.
    plain = to_builtins(checked)
    return {name: plain[name] for name in plain if name not in (*DRIVER_FIELDS, "sudo")} | added


def as_machine_facts(facts):
    """Return facts as a struct: as they are, or read from Ansible's variables.

    The variables have the results of the filters `machine` and `driver`.
    """
    return facts if isinstance(facts, PlanFacts) else read(facts, MachineFacts, facts["host"])


def as_shell_facts(facts):
    """Return ShellFacts for what a machine's shell printed, or for the facts of its modules."""
    if isinstance(facts, ShellFacts):
        return facts
    # The shell's facts are a subset of the facts of modules.
    required = {name: facts[name] for name in ("host", "distribution", "release", "kernel", "arch",
                                               "python")}  # fmt: skip
    optional = {name: facts[name] for name in ("like", "container", "driver_kept") if name in facts}
    return read({**required, **optional}, ShellFacts, facts["host"])


def read_gpu_count(gpus, host):
    """Read the inventory's `gpus`, the number of GPUs that participate; None: all of them."""
    if gpus in (None, ""):
        return None
    if not re.fullmatch("[0-9]{1,4}", str(gpus)):
        raise PlanError(f"{host}: gpus is {gpus!r} in the inventory: write a number, 0 for none")
    return int(gpus)


def driver(facts, host):
    """Check what driver_facts returned."""
    return to_builtins(read(facts, DriverFacts, host))


def setting(variables, name, host, default=""):
    """Read a text of the inventory about a machine. Raises PlanError for another type."""
    value = variables.get(name, default)
    if not isinstance(value, str):
        raise PlanError(
            f"{host}: {name} in the inventory is {str(value)[:40]!r}, which is not text"
        )
    return value


def proven(machines):
    """List [{"host", "names", "precisions"}] of the machines whose GPUs computed correctly.

    machines: the variables of the machines, with the result of role prove (proof.py).
    """
    proofs = []
    for machine in machines:
        host, result = machine["inventory_hostname"], machine.get("prove_cards", {})
        if result.get("rc") == 0 and isinstance(result.get("stdout"), str):
            try:
                proof = parsed(result.get("stdout"), Proof, host)
            except PlanError:
                continue  # an output of another form proves nothing
            proofs.append({"host": host, **to_builtins(proof)})
    return proofs


def read(value, kind, source):
    """Convert a value to a type. Raises PlanError about `source` if the value does not fit."""
    if kind is Printed:  # the output of a program, which may be larger than other texts
        if not isinstance(value, str) or len(value) > MAX_PRINTED:
            raise _impossible(source, "it is not text, or it is too long")
        return LONE_SURROGATE.sub("\ufffd", value)
    try:
        return convert(value, kind, source)
    except Invalid as error:
        raise _impossible(source, error) from None


def parsed(text, kind, source):
    """Read a program's JSON as a type. Raises PlanError about `source` if it does not fit."""
    try:
        return decode(read(text, Printed, source), kind, source)
    except Invalid as error:
        raise _impossible(source, error) from None


def _impossible(source, fault):
    return PlanError(
        f"{source}: {fault}. The machine reports impossible values: find out what is wrong "
        "with it, or remove it from the inventory"
    )
