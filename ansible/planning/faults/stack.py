"""Check GPUs, their driver, the stack, and the requirements of the Python environment.

Each check yields (fault, cause, remedy) for every finding; preflight.findings calls the CHECKS, and
describes `question`, the settings. facts: MachineFacts (boundary/facts.py). The checks predict what
the roles will do by calling the same functions of planning/.
"""

import datetime

from msgspec import structs

from .. import PlanError, stacks, toolkit
from .. import driver as drivers
from .. import driver_candidates as candidates

# Days after which somebody should look for newer drivers: NVIDIA fixes its branches every few
# months.
MAX_TABLE_DAYS = 180
# Days after which a held kernel is a finding, because it gets no security fixes.
MAX_HELD_DAYS = 90
# Numbers of errors that programs cause, by NVIDIA's list "XID Errors"; 45 follows a killed program.
PROGRAM_XIDS = {13, 31, 43, 45}
# Errors of the GPU itself, from the same list.
XID_MEANINGS = {
    48: "an error in its memory that could not be corrected",
    62: "its own controller halted",
    74: "its NVLink failed",
    79: "it has fallen off the bus",
    94: "an error in its memory that was contained",
    95: "an error in its memory that was not contained",
    119: "its firmware (GSP) gave no answer",
}


def check_gpus(facts, question):
    """Explain why NVIDIA cards do not participate."""
    hidden = stacks.find_hidden_gpu(facts)
    if hidden:
        yield ("card_hidden", *hidden)
    # If no other card is left, find_hidden_gpu has reported the reserved card.
    for device in facts.passed_through if stacks.nvidia_devices(facts) else ():
        yield (
            "card_left_out",
            f"Tandem does not use its NVIDIA card {device}, because vfio-pci reserves it for "
            "virtual machines",
            "nothing",
        )
    for device, row in stacks.gpus_without_code(facts, question["table"]):
        yield (
            "card_left_out",
            f"Tandem does not use its {row['name']} card {device}, because no stack supports it",
            "none; but the driver of newer cards does not support it, so connect the screen "
            "to one of the newer cards",
        )


def check_driver(facts, question):
    """Find a missing, unsuitable or half-updated driver of participating GPUs."""
    if not stacks.participating_gpus(facts, question["table"]):
        return
    # The machine's clock may be wrong, but check_clock reports a wrong clock.
    looked_up = datetime.date.fromisoformat(question["table"]["looked_up"])
    age_days = int(facts.clock / 86400) - (looked_up - datetime.date(1970, 1, 1)).days
    if age_days > MAX_TABLE_DAYS and not facts.driver_kept:
        yield (
            "table_old",
            f"the drivers in ansible/stacks.yml were last updated {age_days} days ago",
            "update Tandem; or docs/stacks.md, Newer drivers and kernels",
        )
    if facts.secure_boot and facts.driver is None:
        yield (
            "secure_boot",
            "Secure Boot is on, so its kernel loads only signed modules, and the NVIDIA "
            "driver is not signed",
            _word_remedy(
                facts,
                "make provision installs the driver, and prints how to enrol its key if necessary",
                "install a signed driver on that machine, or enrol the key that signed the "
                "driver's module (mokutil --import)",
            )
            if candidates.dkms_can_sign(facts)
            else "switch Secure Boot off in the firmware's setup",
        )
    if facts.nouveau:
        yield (
            "nouveau",
            "the nouveau driver uses the NVIDIA card",
            _word_remedy(
                facts,
                "make provision installs the NVIDIA driver, switches nouveau off and reboots",
                "install NVIDIA's driver on that machine",
            ),
        )
    elif facts.driver is None:
        yield (
            "driver_missing",
            "no NVIDIA driver is loaded",
            _word_remedy(
                facts,
                "make provision installs the driver for this card",
                "install it on that machine, or find out why it is not loaded (sudo modprobe "
                "nvidia)",
            ),
        )
    # waiting_module comes from driver_facts.py, which runs only on machines with a GPU. A loaded
    # driver shows that the machine has one.
    if facts.driver and facts.waiting_kernel and not facts.waiting_module:
        yield (
            "kernel_module",
            f"its next boot starts kernel {facts.waiting_kernel}, for which there is no module "
            "of the NVIDIA driver yet",
            f"boot the old kernel, or build the module: sudo dkms autoinstall -k "
            f"{facts.waiting_kernel}"
            if facts.driver_kept
            else f"when no run uses it, type make upgrade LIMIT={facts.host}, which upgrades "
            "kernel and driver",
        )
    if facts.driver and facts.driver_library and facts.driver != facts.driver_library:
        yield (
            "driver_mismatch",
            f"the loaded driver is {facts.driver}, but an update installed the library "
            f"{facts.driver_library}",
            _word_remedy(facts, "make provision reboots it and pins the packages", "reboot it"),
        )


def check_branch_end(facts, question):
    """Find a driver's branch that gets no security fixes any more, or whose end is unknown."""
    table = question["table"]
    if not facts.driver or not stacks.participating_gpus(facts, table):
        return
    branch = stacks.parse_version(facts.driver)[0]
    # Ends are months, "2026-08", which sort as texts. The table lists no end of a branch that is
    # older than ended_before, which has ended, and of a branch that is too new, whose end is
    # unknown.
    end_month = table["branch_ends"].get(branch)
    month = datetime.datetime.fromtimestamp(facts.clock, datetime.timezone.utc).strftime("%Y-%m")
    if end_month is None and branch >= table["ended_before"]:
        yield (
            "driver_end_unknown",
            "ansible/stacks.yml does not say when NVIDIA ends the support of driver "
            f"branch {branch}",
            "none; NVIDIA's list of supported drivers (docs.nvidia.com/datacenter/tesla/drivers) "
            "shows whether this branch still gets security fixes",
        )
    elif (end_month or "") < month:
        yield (
            "driver_ended",
            "NVIDIA ended the support of driver branch "
            f"{branch}{f' in {end_month}' if end_month else ''}, so {facts.driver} gets no "
            "security fixes",
            "when no run uses it, install a newer branch yourself (driver_policy is keep)"
            if facts.driver_kept
            else f"when no run uses it, type make upgrade LIMIT={facts.host}, which installs the "
            "newest driver for its cards and release",
        )


def check_gpu_errors(facts, question):
    for number in facts.xids:
        meaning = f" ({XID_MEANINGS[number]})" if number in XID_MEANINGS else ""
        cause = f"its kernel has logged the NVIDIA error Xid {number}{meaning} since it booted"
        if number in PROGRAM_XIDS:
            yield "xid_program", cause, "none, if a program was killed or crashed at that time"
        else:
            yield (
                "xid",
                cause,
                "reboot it; if the error returns (sudo journalctl -kb | grep Xid), the card "
                "may be loose in its slot, too hot, or short of power: check the slot, the "
                "fans and the cables",
            )


def _word_remedy(facts, by_role, by_hand):
    """Choose the remedy: role driver's, or a person's if driver_policy is keep."""
    if not facts.driver_kept:
        return by_role
    # Tandem installs no driver on other processors, so the policy has to stay keep there.
    if facts.arch != "x86_64":
        return by_hand
    return f"{by_hand}; or change driver_policy from keep to install: {by_role}"


def check_stack(facts, question):
    """Find obstacles to the stack: its driver, compiler, toolkit and Python environment."""
    table = question["table"]
    try:
        stack = stacks.resolve([facts], question["stack"], table, decision=question["kept"])
        manager, python = stacks.choose_environment(stack, facts, question["env_manager"])
        refusal = predict_driver_refusal(facts, stack, question)
    except PlanError as error:
        yield ("stack", str(error).removeprefix(f"{facts.host}: "), "see docs/stacks.md")
        return
    if refusal:
        yield ("driver", *refusal)
    elif is_driver_old(facts, stack, table):
        yield describe_old_driver(facts, stack, question)
    # The machine's gcc may be too new for CUDA extensions, which only apex needs.
    builds_extensions = "gcc" in stack and facts.gcc and stacks.known_gpus(facts, table)
    if builds_extensions and toolkit.compiler_obstacle(facts, stack):
        nearest = stacks.find_stack_for_compiler(facts, table)
        yield (
            "gcc",
            f"its gcc is {facts.gcc}, but extensions for CUDA {stack['cuda']} need gcc "
            f"{stack['gcc']} or older, so it cannot build apex's extensions; torch itself works",
            "none: apex's amp works without extensions"
            + (
                f"; the nearest stack that supports this gcc is stack: {nearest}" if nearest else ""
            ),
        )
    # Somebody else's toolkit may be in the folder of the stack's toolkit.
    foreign = toolkit.foreign_toolkit(facts, stack, {"toolkit": question["toolkit"]}, table)
    if foreign is not None:
        yield (
            "toolkit",
            f"it has its own CUDA toolkit in {foreign.folder}: {foreign.reason}",
            "none; to make Tandem ignore this toolkit, set toolkit: false in group_vars/all.yml",
        )
    if not question["provisioned"]:  # an environment that exists needs no installer
        yield from check_environment(facts, manager, python, question)


def predict_driver_refusal(facts, stack, question):
    """Predict a refusal of role driver, by its own function: (cause, remedy), or None."""
    settings = question["driver"]
    if not stack["cuda"] or not stacks.known_gpus(facts, question["table"]):
        return None
    # If apt has no package lists yet, or if packages come from the bundle, it is unknown which
    # packages apt could install.
    installable = facts.offered.keys() - facts.packages.keys()
    if facts.driver_kept or settings["offline"] or not installable:
        return None
    # Two refusals do not count here: describe_old_driver asks for consent to an upgrade, and
    # check_packages reports broken packages.
    if is_driver_old(facts, stack, question["table"]):
        settings = {**settings, "policy": "upgrade"}
    try:
        drivers.decide(structs.replace(facts, broken=None), settings, stack, question["table"])
    except drivers.Refusal as refusal:
        return refusal.args
    return None


def is_driver_old(facts, stack, table):
    """Return true if GPUs participate, and the loaded driver is older than the stack needs."""
    if not stack["cuda"] or not facts.driver or not stacks.known_gpus(facts, table):
        return False
    return stacks.parse_version(facts.driver) < stacks.parse_version(stack["driver"])


def describe_old_driver(facts, stack, question):
    """Return the finding (fault, cause, remedy) about a driver that is too old for the stack."""
    may_upgrade = question["driver"]["policy"] == "upgrade"
    consent = "" if may_upgrade else "set driver_policy: upgrade, and "
    by_role = f"{consent}make provision installs a newer one"
    by_hand = "install a newer driver on that machine yourself (driver_policy is keep)"
    remedy = by_hand if facts.arch != "x86_64" else f"{by_hand}; or {by_role}"
    return (
        "driver_old",
        f"its driver is {facts.driver}, but stack {stack['name']} needs {stack['driver']}",
        remedy if facts.driver_kept else by_role,
    )


def check_environment(facts, manager, python, question):
    """Find what is missing for a new environment.

    manager, python: the result of stacks.choose_environment.
    """
    # Offline machines get python3-venv from the bundle.
    if manager == "venv" and not facts.python_venv and not question["offline"]:
        cause = "its python3 cannot create environments"
        yield "venv", cause, "make provision installs python3-venv"
    if manager == "conda" and not facts.conda and not question["conda_installer"]:
        yield (
            "installer",
            f"conda should install Python {python}, but conda_installer is not set",
            "set conda_installer in group_vars/all.yml: Miniforge, Miniconda or Anaconda, a file "
            "or a URL",
        )
    # facts.conda: the Python of the installed conda. Online, conda downloads another Python.
    if manager == "conda" and question["offline"] and facts.conda not in (None, python):
        yield (
            "installer",
            f"offline is true, but its conda has Python {facts.conda}, not Python {python}, "
            "which the stack needs",
            f"set conda_installer to one that has Python {python}, type on the machine: sudo rm -r "
            "/opt/tandem/conda; then make bundle and make provision",
        )
    # Role python_env runs uv as root. The PATH of root has no ~/.local/bin of a user.
    if manager == "uv" and not facts.uv:
        yield (
            "uv",
            "env_manager is uv, but root finds no program uv on that machine",
            "sudo install ~/.local/bin/uv /usr/local/bin/uv, or env_manager: conda",
        )


def check_held_kernel(facts, question):
    """Find a kernel that has been held for long, which gets no security fixes."""
    if facts.held_since is None:
        return
    days = int((facts.clock - facts.held_since) / 86400)
    if days >= MAX_HELD_DAYS:
        yield (
            "kernel_held",
            f"kernel {facts.kernel} and its driver have been pinned for {days} days, and get "
            "no security fixes",
            f"when no run uses it, type make upgrade LIMIT={facts.host}",
        )


CHECKS = (
    *(check_gpus, check_driver, check_branch_end),
    *(check_gpu_errors, check_stack, check_held_kernel),
)
