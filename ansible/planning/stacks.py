"""Choose the software for machines: pure functions of ansible/stacks.yml and collected facts.

Role preflight, dry-provision and `make check` call `resolve`, which chooses one stack for the whole
cluster. driver.py and toolkit.py then plan single machines. In this file a machine is its PlanFacts
(boundary/facts.py); `resolve` and `predict_stack` also take Ansible's facts. `table` is "stacks" of
stacks.yml, and a stack is one of its "rows". A generation is a row of its table of GPUs, and `sm` a
compute capability: 86 is 8.6.
"""

import re
from pathlib import Path

import yaml
from msgspec import structs

from contract.text import read_yaml

from . import PlanError, reading

NVIDIA = "10de"  # the vendor's number on the PCI bus
# Packages of which an installed driver has at least one: nvidia-tesla-470-kernel-dkms,
# nvidia-driver, nvidia-dkms-570, nvidia-headless-570 and nvidia-headless-no-dkms-570-open.
PACKAGED = re.compile(
    r"nvidia-((tesla-(\d+-)?|legacy-\d+xx-)?((open-)?kernel-(open-)?dkms|driver)$"
    r"|(dkms|driver)(-\d|(-open)?$)|headless-\d|headless-no-dkms-)"
)
# Packages with which an archive offers a whole driver: nvidia-driver-570-server-open on Ubuntu,
# nvidia-tesla-470-kernel-dkms or nvidia-open-kernel-dkms on Debian.
OFFERED = re.compile(r"nvidia-(driver-\d+(-server)?(-open)?|(tesla-\d+-)?(open-)?kernel-dkms)$")


def parse_version(text):
    """Read the numbers of a version string, for comparison: "6.1.0-18-amd64" -> (6, 1, 0).

    Raises PlanError for a text that does not begin with a number.
    """
    match = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", str(text))
    if match is None:
        raise PlanError(f"{text!r} is not a version number")
    return tuple(int(number) for number in match.group().split("."))


def upstream_version(package_version):
    """Extract the publisher's version from a package's: "2:535.261.03-1" -> "535.261.03"."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)", package_version)
    assert match is not None  # boundary/facts.py accepts no other version
    return match[1]


def find_generation(device, table):
    """Find the row of `table["gpus"]` for a PCI device number such as "1e04"; None: no row."""
    number = int(device, 16)
    for row in table["gpus"]["generations"]:
        if row["first"] <= number <= row["last"]:
            return row
    return None


def known_gpus(machine, table):
    """List [(device, generation)] of the participating NVIDIA GPUs, all of known generations.

    Raises PlanError for a GPU that the table lacks.
    """
    rows = participating_gpus(machine, table)
    for device, row in rows:
        if row is None:
            raise PlanError(
                f"{machine.host}: ansible/stacks.yml does not list its NVIDIA card {device}: "
                "add the card's generation to that file; or "
                f"{_leave_card_out('cpu, which needs no card')}"
            )
    return rows


def participating_gpus(machine, table):
    """List [(device, generation or None)] of the participating NVIDIA GPUs, ordered by slot."""
    # GPUs that can only draw do not participate. Of the rest, the first `gpus_counted` do.
    display_gpus = gpus_without_code(machine, table)
    usable_gpus = [pair for pair in _find_generations(machine, table) if pair not in display_gpus]
    return usable_gpus[: machine.gpus_counted]


def gpus_without_code(machine, table):
    """List [(device, generation)] of NVIDIA GPUs for which no stack has code, such as a GT 710."""
    pairs = _find_generations(machine, table)
    return [(device, row) for device, row in pairs if row and is_display_only(row, table)]


def find_hidden_gpu(machine):
    """Explain why an NVIDIA card that the machine has is not usable: (cause, remedy), or None."""
    if machine.gpus_counted == 0:  # gpus=0 in the inventory: no card participates anyway
        return None
    if machine.prime == "off" and not machine.driver:
        return (
            "prime-select (intel) switches its NVIDIA card off",
            "type on that machine: sudo prime-select on-demand && sudo reboot",
        )
    # Such a card does not matter if the machine has another NVIDIA card, which is usable.
    if nvidia_devices(machine):
        return None
    if machine.passed_through:
        return (
            f"vfio-pci reserves its NVIDIA card (PCI ID 10de:{machine.passed_through[0]}) for "
            "virtual machines",
            "delete that ID from the ids= option of vfio-pci (in /etc/modprobe.d or on the "
            "kernel's command line), then reboot the machine",
        )
    # The machine has a driver but no GPU: somebody has removed the card, or the card has failed.
    version = machine.driver or machine.module
    if not version:
        return None
    return (
        f"NVIDIA's driver {version} is installed, but the PC's bus has no NVIDIA card",
        "check the card's seat, its power and the firmware's setup. Reboot the machine, then "
        "type `lspci -d 10de:` on it",
    )


def _find_generations(machine, table):
    """List [(device, generation or None)] of all NVIDIA GPUs, ordered by slot."""
    return [(device, find_generation(device, table)) for device in nvidia_devices(machine)]


def nvidia_devices(machine):
    """List the PCI device numbers of a machine's NVIDIA GPUs."""
    return [gpu.device for gpu in machine.gpus if gpu.vendor == NVIDIA]


def is_display_only(row, table):
    """Return true for a generation of GPUs that is older than the code of every stack."""
    lowest_sm = min(sm for stack in table["rows"].values() for sm in stack.get("sm", ()))
    return row["sm"] < lowest_sm


def _leave_card_out(stack):
    """Write a remedy with two settings, each of which lifts a refusal because of a card.

    stack: the name of a stack that needs no card, or a description of such a name.
    """
    return (
        "set gpus= in the machine's line of inventory.ini to the number of cards that runs may use "
        f"(0: the machine trains on its CPU); or set stack: {stack}"
    )


def choose_environment(stack, machine, manager):
    """Choose (manager, Python) for one machine: ("venv", "3.10"). Raises PlanError if none fits.

    stack: a row of stacks.yml with "name"; manager: the setting env_manager.
    """
    system_python = ".".join(machine.python.split(".")[:2])  # "3.10.12" -> "3.10"
    # "venv" takes the machine's own Python. auto chooses conda only if that Python does not fit.
    if manager in ("auto", "", None):
        manager = "venv" if system_python in stack["python"] else "conda"
    if manager == "conda" and machine.arch != "x86_64":
        raise PlanError(
            f"{machine.host}: its own Python is {system_python}, but stack {stack['name']} needs "
            f"one of {', '.join(stack['python'])}. conda cannot install another Python there, "
            "because its installer is only for x86_64: set env_manager to uv"
        )
    if manager != "venv":  # conda and uv can install any Python; the preferred one comes first
        return manager, stack["python"][0]
    if system_python not in stack["python"]:
        raise PlanError(
            f"{machine.host}: its own Python is {system_python}, but stack {stack['name']} needs "
            f"one of {', '.join(stack['python'])}; set env_manager to conda or uv"
        )
    return manager, system_python


def list_obstacles(name, machine, table):
    """List sentences that explain why `machine` cannot run stack `name`; empty if it can."""
    stack = table["rows"][name]
    host = machine.host
    sentences = []
    if machine.arch not in stack.get("arch", ["x86_64"]):
        sentences.append(
            f"{host}: torch {stack['torch']} with CUDA {stack['cuda']} has no wheels for its "
            f"processor ({machine.arch})"
        )
    if parse_version(machine.glibc) < parse_version(stack["glibc"]):
        sentences.append(
            f"{host}: torch {stack['torch']} needs glibc {stack['glibc']}, but this machine "
            f"has {machine.glibc}"
        )
    if stack["cuda"] is None:  # the stack cpu uses no card
        return sentences
    # A machine without a GPU has no obstacle: a CUDA build of torch also runs on the CPU.
    for device, row in known_gpus(machine, table):
        # Binary code runs on GPUs of the same major number whose minor number is not older
        # (CUDA C++ Programming Guide, "Binary Compatibility").
        sm = row["sm"]
        if not any(built // 10 == sm // 10 and built <= sm for built in stack["sm"]):
            sentences.append(
                f"{host}: torch {stack['torch']} for CUDA {stack['cuda']} has no code for its "
                f"{row['name']} card ({device}, sm_{row['sm']})"
            )
    return sentences


def list_candidates(machines, table):
    """List the names of the stacks that `auto` may choose for these GPUs, the preferred one first.

    A stack that the installed drivers run comes before one that needs a newer driver. Each machine
    has a GPU.
    """
    # An old stack does not know new GPUs, so the newest GPU decides. sm_max None: any GPU.
    newest_sm = max(row["sm"] for machine in machines for _, row in known_gpus(machine, table))
    names = [rule["stack"] for rule in table["auto"] if newest_sm <= (rule["sm_max"] or newest_sm)]
    # sorted() keeps the order of `auto` among stacks of the same effort.
    rows = table["rows"]
    return sorted(names, key=lambda name: max(_rate_driver_effort(m, rows[name]) for m in machines))


def _rate_driver_effort(machine, stack):
    """Rate the work on a machine for a driver that a stack can use.

    0: nothing to do, or the machine gets its first driver; 1: a newer driver of the installed kind;
    2: a newer driver of the other kind (packages or NVIDIA's installer).
    """
    oldest = parse_version(stack["driver"])
    # After a kernel update a driver may be installed but not loaded.
    present = machine.driver or machine.driver_library
    if not present or parse_version(present) >= oldest:
        return 0
    if not any(PACKAGED.match(name) for name in machine.packages):
        return 1  # NVIDIA's installer installed the driver, and can install a newer driver
    # Without driver_facts machine.offered is empty. Then the archive counts as new enough.
    offered_versions = [
        parse_version(upstream_version(package_version))
        for name, package_version in machine.offered.items()
        if OFFERED.match(name) and name not in machine.offered_transitional
    ]
    return 1 if not offered_versions or max(offered_versions) >= oldest else 2


def decision_file(inventory):
    """Return the path of the file with `auto`'s decision: inventory.stack.yml for inventory.ini.

    inventory: the path of the inventory; "" if it is not a file, such as a list of names. The
    result is "" then.
    """
    return str(Path(inventory).with_suffix(".stack.yml")) if inventory else ""


def read_decision(text, path):
    """Read {"stack": name, "path"} of a decision_file. Raises PlanError for another form."""
    try:
        value = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("stack"), str):
        raise PlanError(
            f"{path} does not contain the stack that `stack: auto` chose, for example stack: "
            "cu126. Correct it, or delete the file to choose again"
        )
    return {"stack": value["stack"], "path": str(path)}


def resolve(machines, setting, table, members=(), decision=None):
    """Choose the cluster's stack: its row of stacks.yml, with "name" and "reason".

    machines: facts of the machines that answered; setting: a row's name, or "auto"; members: names
    of all machines of the cluster; decision: the result of `read_decision`, if `auto` decided
    before. Raises PlanError with every obstacle and the nearest stack.
    """
    machines = [reading.as_machine_facts(machine) for machine in machines]
    # A named stack overrules an earlier decision. With auto the decision stays: otherwise a new
    # machine could change the stack of all machines.
    decision = decision if setting == "auto" else None
    # Both the setting and the decided stack must be in the table.
    for name in (setting, decision["stack"] if decision else setting):
        if name != "auto" and name not in table["rows"]:
            raise PlanError(
                f"stack {name!r} is not in ansible/stacks.yml, which has "
                f"{', '.join(table['rows'])} and auto"
            )
    if setting == "auto" and not decision:
        name, reason = _decide_stack(machines, members, table)
    elif decision:
        name, reason = decision["stack"], "decided before, and kept"
        state = f"was chosen earlier ({decision['path']} stores it), but is not possible any more"
        _refuse_impossible(name, machines, table, state)
    else:
        name, reason = setting, "named by `stack`"
        _refuse_impossible(name, machines, table, "does not fit all machines")
    return dict(table["rows"][name], name=name, reason=reason)


def predict_stack(machines, setting, table, members=(), decision=None):
    """Predict the name of the stack that `resolve` will choose, to judge one machine by it.

    Returns `setting` if a stack is named or was decided, or if `auto` cannot decide yet.
    """
    if setting != "auto" or decision:
        return setting
    try:
        return resolve(machines, setting, table, members)["name"]
    except PlanError:
        return setting


def _decide_stack(machines, members, table):
    """Choose (name, reason) of the stack for `auto`. Arguments: see `resolve`.

    Raises PlanError if no stack fits, or if GPUs of machines are unknown.
    """
    # The decision also counts for machines of later days, so no card may be overlooked today.
    for machine in machines:
        hidden = find_hidden_gpu(machine)
        if hidden:
            raise PlanError(
                f"stack: auto chooses once for all machines, but {machine.host} has a card "
                f"that no program can use: {hidden[0]}. Remedy: {hidden[1]}; or "
                f"{_leave_card_out('NAME, of ansible/stacks.yml')}"
            )
    silent_hosts = [name for name in members if name not in {machine.host for machine in machines}]
    with_cards = [machine for machine in machines if known_gpus(machine, table)]
    display_note = "".join(
        f"; Tandem does not use {machine.host}'s {row['name']} card {device}, because no "
        "stack supports it"
        for machine in machines
        for device, row in gpus_without_code(machine, table)
    )
    if not with_cards:
        # A later machine with a GPU can also run the stack cpu, so silent machines are only named.
        hosts = ", ".join(silent_hosts)
        silent_note = f"; unknown, because they did not answer: {hosts}" if hosts else ""
        kind = " that takes part" if any(map(nvidia_devices, machines)) else ""
        reason = f"no machine that answered has an NVIDIA GPU{kind}{display_note}{silent_note}"
        return "cpu", reason
    if silent_hosts:
        raise PlanError(
            f"stack: auto chooses once for all machines, but {', '.join(silent_hosts)} did "
            "not report its card. Switch that machine on, and run once without --limit; or "
            "write stack: NAME into group_vars/all.yml; or remove its line from the inventory"
        )
    names = list_candidates(with_cards, table)
    fitting = [name for name in names if not _all_obstacles(name, with_cards, table)]
    if not fitting:
        # The obstacles to one stack are enough for a user: to the last one that auto would choose.
        sentences = ". ".join(_all_obstacles(names[-1], with_cards, table))
        # To leave a card out helps only if all obstacles are cards.
        without_gpus = [structs.replace(machine, gpus=[]) for machine in with_cards]
        remedy = (
            f". To leave this card out, {_leave_card_out('NAME, of ansible/stacks.yml')}"
            if not _all_obstacles(names[-1], without_gpus, table)
            else ""
        )
        raise PlanError(f"no stack fits all machines. {sentences}{remedy}")
    hosts_without_gpu = [machine.host for machine in machines if machine not in with_cards]
    reason = "the first stack of `auto` in ansible/stacks.yml that every card supports"
    # `list_candidates` puts a stack that needs no other driver first, even against `auto`'s order.
    if fitting[0] != min(fitting, key=[rule["stack"] for rule in table["auto"]].index):
        reason += " and that the installed drivers support"
    note = f"; no NVIDIA GPU in {', '.join(hosts_without_gpu)}" if hosts_without_gpu else ""
    return fitting[0], reason + note + display_note


def _refuse_impossible(name, machines, table, state):
    """Raise PlanError with all obstacles to a stack, if it has any.

    state: the predicate of the message, such as "does not fit all machines".
    """
    sentences = _all_obstacles(name, machines, table)
    if not sentences:
        return
    with_cards = [machine for machine in machines if known_gpus(machine, table)]
    names = list_candidates(with_cards, table) if with_cards else ["cpu"]
    fitting = [candidate for candidate in names if not _all_obstacles(candidate, machines, table)]
    nearest = (
        f"the nearest stack that fits all machines is stack: {fitting[0]}"
        if fitting
        else "no stack fits all machines"
    )
    raise PlanError(f"stack {name} {state}. {'. '.join(sentences)}; {nearest}")


def resolve_driver(machine, stack, table, setting="auto"):
    """Choose the row of `drivers` for a machine's GPUs, kernel and stack; None if it needs none.

    stack: the result of `resolve`; setting: "auto" (the newest driver that fits), or a version in
    the table. Raises PlanError if no driver fits.
    """
    gpus = known_gpus(machine, table)
    if not gpus or stack["cuda"] is None:
        return None
    # The newest driver comes first in the table.
    rows = [row for row in table["drivers"] if setting in ("auto", row["version"])]
    if not rows:
        names = ", ".join(row["version"] for row in table["drivers"])
        raise PlanError(
            f"driver {setting} is not in ansible/stacks.yml, which has {names} and auto"
        )
    sms = [row["sm"] for _, row in gpus]
    obstacle_clauses = []
    for driver in rows:
        reasons = _driver_obstacles(driver, machine, sms, stack)
        if not reasons:
            return driver
        obstacle_clauses += [f"driver {driver['version']} {reason}" for reason in reasons]
    nearest = ""
    if setting != "auto":  # with auto, every row has been tried above
        all_rows = table["drivers"]
        fitting = [row for row in all_rows if not _driver_obstacles(row, machine, sms, stack)]
        nearest = f"; the nearest that fits: driver {fitting[0]['version']}" if fitting else ""
    raise PlanError(f"{machine.host}: no driver fits: {'; '.join(obstacle_clauses)}{nearest}")


def find_stack_for_compiler(machine, table):
    """Find the newest stack that a machine can run and whose nvcc accepts its gcc, or None."""
    # The newest stack comes first in the table.
    gcc = parse_version(machine.gcc)[0]
    fitting = (
        name
        for name, row in table["rows"].items()
        if gcc <= row.get("gcc", 0) and not list_obstacles(name, machine, table)
    )
    return next(fitting, None)


def _driver_obstacles(driver, machine, sms, stack):
    """List clauses that explain why a row of `drivers` does not fit; [] if it fits.

    sms: the compute capabilities of the machine's GPUs.
    """
    kernel, limits = parse_version(machine.kernel), driver["kernel"]
    clauses = []
    if parse_version(driver["version"]) < parse_version(stack["driver"]):
        clauses.append(f"is older than the {stack['driver']} that stack {stack['name']} needs")
    if kernel < parse_version(limits["min"]):
        clauses.append(f"needs kernel {limits['min']}, but this kernel is {machine.kernel}")
    if limits["below"] is not None and kernel >= parse_version(limits["below"]):
        clauses.append(
            f"builds only on kernels below {limits['below']}, but this kernel is {machine.kernel}"
        )
    oldest, newest = driver["sm"]["min"], driver["sm"]["max"]
    clauses += [f"does not know sm_{sm}" for sm in sms if not oldest <= sm <= newest]
    return clauses


def _all_obstacles(name, machines, table):
    return [sentence for machine in machines for sentence in list_obstacles(name, machine, table)]
