"""What machines say, checked once where it comes in (boundary/facts.py); all of planning/ behind it
trusts it. A value that cannot be, in type, range, size or alphabet, is a PlanError: that machine's
failure.
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
    """MachineFacts, without the driver's, as plain values for Ansible: what machine_facts returned,
    asked by this address and about these folders; gpus and driver_policy: what the settings say."""
    known = read(facts, MachineFacts, host)
    lacking = [folder for folder in folders if folder not in known.disks]
    if lacking:
        raise _impossible(host, f"it says nothing of the disk of {lacking[0]}")
    interface = next((link.name for link in known.links if address in link.addresses), None)
    own = {"interface": interface, "host": host, "gpus_counted": counted(gpus, host),
           "driver_kept": driver_policy == "keep"}  # fmt: skip
    plain = to_builtins(known)
    return {name: plain[name] for name in plain if name not in (*DRIVER, "sudo")} | own


def known(facts):
    """What `machine` and `driver` returned, from Ansible's variables, as typed values again."""
    return facts if isinstance(facts, PlanFacts) else read(facts, MachineFacts, facts["host"])


def shell(facts):
    """What the shell of a machine says, or what its facts say of the same."""
    if isinstance(facts, ShellFacts):
        return facts
    named = ("host", "distribution", "release", "kernel", "arch", "python")
    more = {name: facts[name] for name in ("like", "container", "driver_kept") if name in facts}
    return read({**{name: facts[name] for name in named}, **more}, ShellFacts, facts["host"])


def counted(gpus, host):
    """How many of a machine's cards take part by the inventory's `gpus`; None: all."""
    if gpus in (None, ""):
        return None
    if not re.fullmatch("[0-9]{1,4}", str(gpus)):
        raise PlanError(f"{host}: gpus is {gpus!r} in the inventory: write a number, 0 for none")
    return int(gpus)


def driver(facts, host):
    """What driver_facts returned."""
    return to_builtins(read(facts, DriverFacts, host))


def setting(variables, name, host, default=""):
    """A text that the inventory says of a machine."""
    value = variables.get(name, default)
    if not isinstance(value, str):
        raise PlanError(f"{host}: {name} in the inventory is {str(value)[:40]!r}, which is no text")
    return value


def proven(machines):
    """[{"host", "names", "precisions"}] of those whose products were right, by role prove's command
    in their variables."""
    proofs = []
    for machine in machines:
        host, done = machine["inventory_hostname"], machine.get("prove_cards", {})
        if done.get("rc") == 0 and isinstance(done.get("stdout"), str):
            try:
                proof = parsed(done.get("stdout"), Proof, host)
            except PlanError:
                continue  # what it printed is no proof
            proofs.append({"host": host, **to_builtins(proof)})
    return proofs


def read(value, kind, what):
    """The value of this type; PlanError where it is none."""
    if kind is Printed:  # of any size that a program may print
        if not isinstance(value, str) or len(value) > PRINTED:
            raise _impossible(what, "it is no text, or too long")
        return LONE.sub("\ufffd", value)
    try:
        return convert(value, kind, what)
    except Invalid as error:
        raise _impossible(what, error) from None


def parsed(text, kind, what):
    """What a program printed as JSON."""
    try:
        return decode(read(text, Printed, what), kind, what)
    except Invalid as error:
        raise _impossible(what, error) from None


def _impossible(what, wrong):
    return PlanError(
        f"{what}: {wrong}. The machine reports what cannot be: see what is wrong with it, or take "
        "it out of the inventory"
    )
