"""Check what machines report, once (by boundary/facts.py): all of planning/ trusts it then.

A value that cannot be, in type, range, size or alphabet, is a PlanError: that machine's failure.
"""

from __future__ import annotations

import re

from msgspec import to_builtins

from boundary.facts import (
    DRIVER,
    PRINTED,
    DriverFacts,
    MachineFacts,
    PlanFacts,
    Printed,
    Proof,
    ShellFacts,
)
from boundary.schema import Invalid, convert, decode

from . import PlanError

LONE = re.compile("[\ud800-\udfff]")  # halves of surrogates, which no file could hold


def machine(facts, host, address="", folders=(), gpus=None, driver_policy=""):
    """Check what machine_facts returned; give MachineFacts without the driver's as plain values.

    address: the one in the inventory; folders: those whose disks were asked for; gpus and
    driver_policy: the settings. Raises PlanError.
    """
    checked = read(facts, MachineFacts, host)
    lacking = [folder for folder in folders if folder not in checked.disks]
    if lacking:
        raise _impossible(host, f"it says nothing of the disk of {lacking[0]}")
    interface = next((link.name for link in checked.links if address in link.addresses), None)
    added = {"interface": interface, "host": host, "gpus_counted": counted(gpus, host),
           "driver_kept": driver_policy == "keep"}  # fmt: skip
    # As plain values, since Ansible stores them as variables. `driver` returns the driver's.
    plain = to_builtins(checked)
    return {name: plain[name] for name in plain if name not in (*DRIVER, "sudo")} | added


def known(facts):
    """Read from Ansible's variables what `machine` and `driver` returned, as typed values again."""
    return facts if isinstance(facts, PlanFacts) else read(facts, MachineFacts, facts["host"])


def shell(facts):
    """Read ShellFacts from a machine's shell, or the same values from its facts."""
    if isinstance(facts, ShellFacts):
        return facts
    # The shell's facts are a subset of the facts of modules.
    required = {name: facts[name] for name in ("host", "distribution", "release", "kernel", "arch",
                                               "python")}  # fmt: skip
    optional = {name: facts[name] for name in ("like", "container", "driver_kept") if name in facts}
    return read({**required, **optional}, ShellFacts, facts["host"])


def counted(gpus, host):
    """Read how many GPUs of a machine participate by the inventory's `gpus`; None: all."""
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
    """List [{"host", "names", "precisions"}] of the machines that computed role prove's products
    correctly; machines: their variables."""
    proofs = []
    for machine in machines:
        host, result = machine["inventory_hostname"], machine.get("prove_cards", {})
        if result.get("rc") == 0 and isinstance(result.get("stdout"), str):
            try:
                proof = parsed(result.get("stdout"), Proof, host)
            except PlanError:
                continue  # its output is no proof
            proofs.append({"host": host, **to_builtins(proof)})
    return proofs


def read(value, kind, source):
    """Convert a value to a type; PlanError about `source` if it does not fit."""
    if kind is Printed:  # larger than other texts may be
        if not isinstance(value, str) or len(value) > PRINTED:
            raise _impossible(source, "it is not text, or it is too long")
        return LONE.sub("\ufffd", value)
    try:
        return convert(value, kind, source)
    except Invalid as error:
        raise _impossible(source, error) from None


def parsed(text, kind, source):
    """Read a program's JSON as a type; PlanError about `source` if it does not fit."""
    try:
        return decode(read(text, Printed, source), kind, source)
    except Invalid as error:
        raise _impossible(source, error) from None


def _impossible(source, fault):
    return PlanError(
        f"{source}: {fault}. The machine reports impossible values: find out what is wrong "
        "with it, or remove it from the inventory"
    )
