"""Graphics cards, their driver, and what the Python environment needs."""

from .. import driver_offers as offers
from .. import stacks, toolkit
from ..errors import PlanError

# Days after which a held kernel is a finding.
LONG_HELD = 90


def driver(facts, question):
    if not any(gpu["vendor"] == stacks.NVIDIA for gpu in facts["gpus"]):
        return
    if facts["secure_boot"] and facts["driver"] is None:
        yield (
            "secure_boot",
            "Secure Boot is on, and its kernel loads only signed modules: not the NVIDIA driver",
            _by_the_role(
                question,
                "make provision installs the driver, and says how to enrol its key if it needs one",
            )
            if offers.can_sign(facts)
            else "switch Secure Boot off in the firmware's setup",
        )
    if facts["nouveau"]:
        yield (
            "nouveau",
            "the nouveau driver holds the NVIDIA card",
            _by_the_role(
                question,
                "make provision installs the NVIDIA driver, switches nouveau off and reboots",
            ),
        )
    elif facts["driver"] is None:
        yield (
            "driver_missing",
            "no NVIDIA driver is loaded",
            _by_the_role(question, "make provision installs the one for this card"),
        )
    if facts["driver"] and facts["driver_library"] and facts["driver"] != facts["driver_library"]:
        yield (
            "driver_mismatch",
            f"the loaded driver is {facts['driver']} and the installed library "
            f"{facts['driver_library']}: an update came in between",
            _by_the_role(question, "make provision reboots it and holds the packages"),
        )


def _by_the_role(question, what):
    """A remedy that role driver carries out, unless driver_policy keeps it from doing so."""
    if question["driver_policy"] == "keep":
        return f"set driver_policy: install (it is keep now), and {what}"
    return what


def fitting(facts, question):
    table = question["table"]
    try:
        stack = stacks.resolve([facts], question["stack"], table, kept=question["kept"])
        manager, python = stacks.python_for(stack, facts, question["env_manager"])
        chosen = offers.to_be_had(facts, question["driver_version"], stack, table)
    except PlanError as error:
        yield ("stack", str(error).removeprefix(f"{facts['host']}: "), "see docs/stacks.md")
        return
    yield from old_driver(facts, stack, chosen, question)
    yield from compiler(facts, stack, table)
    yield from own_toolkit(facts, stack, question)
    if not question["provisioned"]:
        yield from environment(facts, manager, python, question)


def old_driver(facts, stack, chosen, question):
    loaded = facts["driver"]
    if chosen and loaded and stacks.version(loaded) < stacks.version(stack["driver"]):
        yield (
            "driver_old",
            f"its driver is {loaded}, and stack {stack['name']} needs {stack['driver']}",
            ("" if question["driver_policy"] == "upgrade" else "set driver_policy: upgrade, and ")
            + "make provision installs a newer one",
        )


def compiler(facts, stack, table):
    if "gcc" not in stack or not facts["gcc"] or not stacks.cards(facts, table):
        return
    if toolkit.compiler_obstacle(facts, stack):
        nearest = stacks.for_compiler(facts, table)
        yield (
            "gcc",
            f"its gcc is {facts['gcc']}, and extensions for CUDA {stack['cuda']} take gcc up to "
            f"{stack['gcc']}: such as apex cannot be compiled here; torch itself is not concerned",
            "nothing: apex's amp works without them"
            + (f"; the nearest stack that takes this gcc is stack: {nearest}" if nearest else ""),
        )


def own_toolkit(facts, stack, question):
    """What becomes of a toolkit that somebody else installed where the stack's own would go."""
    there = toolkit.found_toolkit(facts, stack, {"toolkit": question["toolkit"]}, question["table"])
    if there is not None:
        yield (
            "toolkit",
            f"it has a CUDA toolkit of its own in {there.folder}: {there.reason}",
            "nothing; toolkit: false in group_vars/all.yml has none considered",
        )


def environment(facts, manager, python, question):
    # The bundle of a machine without internet has it.
    if manager == "venv" and not facts["python_venv"] and not question["offline"]:
        yield (
            "venv",
            "its python3 cannot make environments",
            "make provision installs python3-venv",
        )
    if manager == "conda" and not facts["conda"] and not question["conda_installer"]:
        yield (
            "installer",
            f"Python {python} is to be installed by conda, but no installer of conda is named",
            "set conda_installer in group_vars/all.yml: Miniforge, Miniconda or Anaconda, a file "
            "or a URL",
        )
    if manager == "uv" and not facts["uv"]:
        yield (
            "uv",
            "env_manager is uv, but root finds no program uv there",
            "sudo install ~/.local/bin/uv /usr/local/bin/uv, or env_manager: conda",
        )


def held(facts, question):
    """A held kernel gets no security fixes, so after a while somebody should be told."""
    if facts["held_since"] is None:
        return
    days = int((facts["clock"] - facts["held_since"]) / 86400)
    if days >= LONG_HELD:
        yield (
            "kernel_held",
            f"kernel {facts['kernel']} and its driver have been held together for {days} days, and "
            "get no security fixes",
            f"when nothing trains there: make upgrade LIMIT={facts['host']}",
        )


CHECKS = (driver, fitting, held)
