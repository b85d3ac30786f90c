"""Print what site.yml would install on which machine, and change nothing: `make dry-provision`.

The machines come from the inventory, or from a file of facts (--facts, examples/machines/), which
--save writes. planning/ makes both the plans that this program prints and the plans that the roles
carry out, so this program decides nothing itself.

Exit code 0: planned; 1: a machine would be refused; 2: the machines could not be asked.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import yaml
from msgspec import UNSET, Struct, UnsetType, defstruct, structs, to_builtins

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launcher/ is

from boundary.facts import DRIVER_FIELDS, PlanFacts, ShellFacts
from boundary.schema import Integer, Text
from contract import interrupts
from contract.errors import UserError
from contract.scratch import scratch_folder
from contract.text import read_text
from planning import PlanError, driver, looks, preflight, reading, stacks, toolkit

ANSIBLE = Path(__file__).resolve().parent
ROOT = ANSIBLE.parent
PLAYBOOK = ANSIBLE / "playbooks" / "facts.yml"
WIDTH = 80  # columns of a terminal
# The settings of roles other than driver, whose settings are in driver.SETTINGS.
SETTINGS = (
    *("stack", "env_manager", "conda_installer", "pip_index_url"),
    *("toolkit", "apex", "apex_extensions", "gpus"),
)
# Settings whose value may be a text, true or false.
SWITCHES = ("toolkit", "apex", "apex_extensions", *(row.name for row in driver.SETTINGS.values()))


class Decision(Struct):
    """The earlier decision of `stack: auto`, as stacks.read_decision returns it, or nothing."""

    stack: Union[Text, UnsetType] = UNSET
    path: Union[Text, UnsetType] = UNSET


# The settings that a file of facts may have. People edit such files, so the types are checked.
Setting = defstruct(
    "Setting",
    [
        *((name, Union[Text, UnsetType], UNSET) for name in ("stack", "conda_installer")),
        ("pip_index_url", Union[Text, UnsetType], UNSET),
        *((name, Union[bool, Text, UnsetType], UNSET) for name in SWITCHES),
        ("env_manager", Union[Literal["auto", "venv", "conda", "uv"], UnsetType], UNSET),
        ("gpus", Union[Integer, Text, UnsetType], UNSET),
        ("kept", Union[Decision, UnsetType], UNSET),
    ],
)
# Facts that files of earlier releases lack, and that have a default.
OPTIONAL_FACTS = {"held", "held_by_us", "signing_key"}


class Machine(NamedTuple):
    host: str
    settings: dict[str, Any]  # by their names in group_vars/all.yml
    # None: the machine did not answer. ShellFacts that are no PlanFacts: role reach refused it.
    facts: ShellFacts | None


def plan_rows(entries, table, bundle):
    """Return [{"host", "topic", "lines"}]: everything that would be installed, by machine.

    entries: [{"facts", "settings"}], one per machine; the facts of a machine that did not answer
    have only "host". table: "stacks" of stacks.yml. bundle: the folder with downloaded files.
    Raises PlanError if no stack fits, and UserError if a fact is missing.
    """
    machines = list(map(_make_machine, entries))
    refused = _find_refusals([machine.facts for machine in machines if machine.facts])
    printed = [
        {"host": host, "topic": "system",
         "lines": [f"REFUSED: {row['cause']}", f"remedy: {row['remedy']}"]}
        for host, row in refused.items()
    ]  # fmt: skip
    # Another Ansible, or a package, removes a REMEDIABLE fault. So such a machine stays a member:
    # `stack: auto` has to know its cards.
    excluded = [host for host, row in refused.items() if row["fault"] not in looks.REMEDIABLE]
    members = [machine.host for machine in machines if machine.host not in excluded]
    machines = [machine for machine in machines if machine.facts and machine.host not in refused]
    if not machines and not printed:
        raise PlanError(f"{', '.join(members)}: no machine answered, so nothing can be planned")
    if not machines:
        return printed
    for machine in machines:
        if not isinstance(machine.facts, PlanFacts):
            raise _missing_fact(machine.host, "gpus")  # only PlanFacts have this fact
    all_facts = [machine.facts for machine in machines]
    # The settings of stack, toolkit and apex are the same for the whole cluster.
    common = machines[0].settings
    try:
        stack = stacks.resolve(all_facts, common["stack"], table, members, common.get("kept"))
    except PlanError as error:
        # A refused machine may be the reason that no stack can be chosen, so its finding comes too.
        reasons = [*map(preflight.text, refused.values()), str(error)]
        raise PlanError(". ".join(reasons)) from None
    # plans: {host: {"toolkit", "foreign", "apex"}}, as toolkit.toolkit_plan describes.
    switches = {name: common[name] for name in ("toolkit", "apex", "apex_extensions")}
    plans = toolkit.toolkit_plan(all_facts, stack, switches, table)
    for host, settings, facts in machines:
        plan = plans[host]
        topics = [
            ("cards", _describe_cards(facts, table)),
            ("stack", [f"{stack['name']}: {stack['reason']}"]),
            ("driver", _describe_driver(facts, settings, stack, table, bundle)),
            *_toolkit_topics(plan["toolkit"], plan["foreign"], bundle),
            *_environment_topics(facts, settings, stack),
            ("apex", _describe_apex(plan["apex"], bundle)),
        ]
        printed += [{"host": host, "topic": topic, "lines": lines} for topic, lines in topics]
    return printed


def _make_machine(entry):
    """Make the Machine of an entry. Raises UserError and PlanError."""
    facts, settings = entry["facts"], entry["settings"]
    host = reading.read(facts["host"], Text, "a machine.host")
    if set(facts) == {"host"}:
        return Machine(host, settings, None)
    kind = PlanFacts if "gpus" in facts else ShellFacts
    # PlanFacts has defaults for the facts of driver_facts, but the driver's plan needs real values.
    required = {field.name for field in structs.fields(kind) if field.required}
    required |= {*DRIVER_FIELDS} - OPTIONAL_FACTS if kind is PlanFacts else set()
    missing = sorted(required - set(facts))
    if missing:
        raise _missing_fact(host, missing[0])
    # Two settings of the inventory count as facts of the machine.
    setting_facts = {"driver_kept": settings.get("driver_policy") == "keep"}
    if kind is PlanFacts:
        setting_facts["gpus_counted"] = reading.read_gpu_count(settings.get("gpus"), host)
    return Machine(host, settings, reading.read({**facts, **setting_facts}, kind, host))


def _missing_fact(host, name):
    """Make the UserError for a fact that a file of facts lacks."""
    return UserError(
        f"tandem: the facts of {host} lack {name!r}: the file is old or incomplete. Save it "
        "again: .venv/bin/python ansible/dry_provision.py --save FILE"
    )


def _find_refusals(all_facts):
    """Find {host: its first finding} of the machines that role reach refuses, by looks.unfit."""
    # If a machine has PlanFacts, modules have run on it, so its Python is no obstacle.
    examined_hosts = {facts.host for facts in all_facts if isinstance(facts, PlanFacts)}
    refusals = {}
    for finding in looks.unfit(all_facts, importlib.metadata.version("ansible-core")):
        if finding["host"] not in examined_hosts or finding["fault"] not in looks.REMEDIABLE:
            refusals.setdefault(finding["host"], finding)
    return refusals


def _describe_cards(facts, table):
    """Return a line per NVIDIA card, and a line with the operating system and the compiler."""
    # Devices of participating cards that have no line yet.
    unlisted = [device for device, _ in stacks.participating_gpus(facts, table)]
    lines = []
    for device in stacks.nvidia_devices(facts):
        row = stacks.find_generation(device, table)
        if row is None:
            lines.append(f"NVIDIA {device}, a card that is not in ansible/stacks.yml")
        elif device in unlisted:
            # Two equal cards have the same device number, and gpus= may let only one participate.
            unlisted.remove(device)
            capability = f"{row['sm'] // 10}.{row['sm'] % 10}"
            lines.append(f"{row['name']} {device}, compute capability {capability}")
        else:
            is_display_only = stacks.is_display_only(row, table)
            reason = "no stack has code for it" if is_display_only else "by gpus= of its line"
            lines.append(f"{row['name']} {device}, not used: {reason}")
    system = f"{facts.distribution.capitalize()} {facts.release}, kernel {facts.kernel}"
    gcc = f"gcc {facts.gcc}" if facts.gcc else "no gcc"
    # vfio-pci or prime-select may keep a card from the driver.
    hidden = stacks.find_hidden_gpu(facts)
    lines += [hidden[0]] if hidden else []
    return [*(lines or ["no card of NVIDIA's"]), f"{system}, {gcc}"]


def _describe_driver(facts, settings, stack, table, bundle):
    """Return lines with the driver, its source and its needs, or with a refusal and its remedy."""
    files = (bundle / "installers" / stack["name"]).glob("*.run")
    options = driver.driver_wanted(settings, [path.name for path in files])
    plan = driver.driver_plan(facts, options, stack, table)  # a dictionary: driver_actions.as_dict
    if plan["action"] == "refuse":
        return [f"REFUSED: {plan['reason']}", f"remedy: {plan['remedy']}"]
    lines = [plan["reason"]]
    if plan.get("module"):
        lines[0] += f", {plan['module']} kernel module"
    if plan.get("url"):
        lines += [f"file {Path(plan['url']).name}", _name_server(plan["url"])]
    if plan.get("packages"):
        lines += ["from the distribution's archive:"]
        # "nvidia-driver-570=570.133.07-0ubuntu1": apt's form of a package and its version.
        lines += [package.replace("=", " ", 1) for package in plan["packages"]]
    # A driver may also need tools, a reboot, and a person at the machine's screen.
    if plan.get("tools"):
        lines.append(f"and to build the module: {', '.join(plan['tools'])}")
    if plan.get("waiting"):
        lines.append(f"also for kernel {plan['waiting']}, which the next boot starts")
    reboot = []
    if plan.get("reboot_first"):
        changes = ["without nouveau"] * facts.nouveau
        changes += [f"without {plan['without']}"] if plan.get("without") else []
        changes = changes or [f"into kernel {facts.waiting_kernel}"]
        reboot = [f"after a reboot {' and '.join(changes)}"]
    elif plan["action"] == "package" and facts.nouveau:
        reboot = ["and a reboot, if nouveau holds the card"]
    elif plan.get("screen") and plan["action"] != "load":
        reboot = ["under the running display: the next boot starts with it"]
    elif plan["action"] != "nothing" and facts.driver not in (None, plan["version"]):
        reboot = [f"and a reboot, since driver {facts.driver} is loaded, if it is in use"]
    if reboot and facts.boot_passphrases:
        disks = ", ".join(facts.boot_passphrases)
        reboot.append(f"which waits at its screen for the passphrase of {disks}")
    lines += reboot
    if plan.get("key"):
        lines.append(
            f"Secure Boot: the module is signed with this machine's own key ({plan['key']}), "
            "which you must enrol once at its screen; make provision prints how, and then "
            "continues"
        )
    # These are the cases in which role driver reboots a machine.
    if facts.seated and (plan.get("screen") or plan.get("reboot_first") or facts.nouveau):
        lines.append(
            f"before a reboot, Tandem asks {', '.join(facts.seated)}, who is logged in "
            "at its screen"
        )
    return lines


def _toolkit_topics(plan, foreign, bundle):
    """List (topic, lines) of the toolkit; foreign: a ForeignToolkit's fields, or None."""
    if plan is None and foreign is not None:
        return [("toolkit", [f"none is installed; {foreign['folder']}: {foreign['reason']}"])]
    if plan is None:
        return [("toolkit", ["none: torch brings its own CUDA, cuDNN and NCCL"])]
    topics = []
    for component in plan["parts"]:
        # cuDNN and NCCL are unpacked into the folder of the toolkit.
        is_toolkit = component["name"] == "cuda"
        location = plan["folder"] if is_toolkit else f"inside {plan['folder']}"
        lines = _describe_component_file(component, plan, bundle)
        topics.append((component["name"], [f"{component['version']}, {location}", *lines]))
    return topics


def _describe_component_file(component, plan, bundle):
    """Return lines with a component's file and its source: a server, or a page for a person."""
    folder = f"bundle/installers/{plan['bundle']}"
    lines = [f"file {component['file']}"]
    url = component["url"]
    lines += [_name_server(url)] if url else ["by hand from", component["page"]]
    is_bundled = (bundle / "installers" / plan["bundle"] / component["file"]).is_file()
    return [*lines, f"{'in' if is_bundled else 'not yet in'} {folder}"]


def _name_server(url):
    """Write "from SERVER" for a URL: "https://us.download.nvidia.com/XFree86/..."."""
    return f"from {url.split('/')[2]}"


def _environment_topics(facts, settings, stack):
    """List (topic, lines) of the Python environment: its Python, torch and torchvision."""
    # A Python that does not fit is a line of its own, so that the other topics are printed too.
    try:
        manager, python = stacks.choose_environment(stack, facts, settings["env_manager"])
    except PlanError as error:
        return [("python", [f"REFUSED: {error}"])]
    lock = ANSIBLE / "locks" / f"{stack['lock']}-py{python}.txt"
    # Another lock makes another environment, so that runs in the present environment continue.
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    variables = yaml.safe_load((ANSIBLE / "roles/python_env/vars/main.yml").read_text())
    folder = f"{variables['python_env_root']}/envs/{stack['name']}-{digest}"
    # "https://repo.anaconda.com/miniconda/Miniconda3-latest-Linux-x86_64.sh", or a path.
    conda = (settings["conda_installer"] or "").rpartition("/")[2]
    source = {
        "venv": "the machine's own",
        "conda": f"with {conda or 'conda_installer: not set'}",
        "uv": "from uv",
    }[manager]
    offline = driver.driver_wanted(settings, [])["offline"]
    index = "the bundle" if offline else settings["pip_index_url"]
    return [
        ("python", [f"{python} from {manager}, {folder}", source]),
        ("torch", [stack["torch"], f"{lock.relative_to(ROOT)}", f"wheels from {index}"]),
        ("torchvision", [stack["torchvision"], "as torch"]),
    ]


def _describe_apex(plan, bundle):
    """Return lines with apex's version, file and source, or with what replaces apex."""
    if plan is None:
        return ["none: O1 to O3 run on torch.amp"]
    kind = f"with CUDA extensions for {plan['arch_list']}" if plan["extensions"] else "Python only"
    return [
        f"{plan['part']['version']}, {kind} ({plan['reason']})",
        *_describe_component_file(plan["part"], plan, bundle),
        "built here",
    ]


def format_rows(rows):
    """Return the text for people: a paragraph per machine, at most 80 columns wide.

    rows: the result of plan_rows.
    """
    lines, host = [], None
    for row in rows:
        if row["host"] != host:
            host = row["host"]
            lines += ["", host] if lines else [host]
        for number, line in enumerate(row["lines"]):
            # The topic stands only before its first line: "  driver      driver 580.95.05, ...".
            indent = f"  {row['topic'] if number == 0 else '':<12}"
            lines += textwrap.wrap(
                line, WIDTH, initial_indent=indent, subsequent_indent=" " * 16,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    return "\n".join(lines)


def read_settings():
    """Read the settings of group_vars/all.yml, since a file of facts may lack settings."""
    values = yaml.safe_load((ROOT / "group_vars" / "all.yml").read_text())
    index = values["mirrors"][values["mirror"]]["pip"]
    return {**values, "pip_index_url": index}


def collect_facts(inventory, extra):
    """Collect [{"facts", "settings"}] of the machines by playbooks/facts.yml. Raises UserError."""
    with scratch_folder() as folder:
        output = folder / "facts.json"
        argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(PLAYBOOK)]
        driver_settings = [setting.name for setting in driver.SETTINGS.values()]
        variables = {"facts_output": str(output), "facts_names": [*driver_settings, *SETTINGS]}
        argv += ["--extra-vars", json.dumps(variables)]
        argv += ["--inventory", inventory] if inventory else []
        environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
        printed = subprocess.run(
            argv + extra, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ).stdout
        # The exit code says only that some machine did not answer. If a machine did, a file exists.
        if not output.exists():
            raise UserError(
                f"{printed}\ntandem: ansible-playbook could not check the machines (see above)"
            )
        entries = json.loads(output.read_text())
    # Role preflight stores the decision of `stack: auto` next to the inventory.
    path = Path(stacks.decision_file(inventory or ROOT / "inventory.ini"))
    decision = {"kept": stacks.read_decision(path.read_text(), path) if path.is_file() else {}}
    return [{**entry, "settings": {**decision, **entry["settings"]}} for entry in entries]


def read_facts_file(path):
    """Read [{"facts", "settings"}] from a file that --save wrote. Raises UserError."""
    try:
        entries = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"tandem: {path} is not a readable file of facts: {error}") from None
    for entry in entries if isinstance(entries, list) else [None]:
        facts = entry.get("facts") if isinstance(entry, dict) else None
        has_host = isinstance(facts, dict) and isinstance(facts.get("host"), str)
        if not has_host or not isinstance(entry.get("settings", {}), dict):
            raise UserError(
                f"tandem: {path} is not a file of facts, a list of objects that each have "
                '"facts" with a "host" (examples/machines/ has examples)'
            )
    common_settings = read_settings()
    try:
        for entry in entries:
            entry_settings = reading.read(entry.get("settings", {}), Setting, "settings")
            entry["settings"] = {**common_settings, **to_builtins(entry_settings)}
            # plan_rows makes the machine again. This call reports a wrong fact with the file's
            # name.
            _make_machine(entry)
    except PlanError as error:
        raise UserError(f"tandem: {path} is not a file of facts: {error}") from None
    return entries


def main(argv=None):
    parser = argparse.ArgumentParser(description="Print what site.yml would install where.")
    parser.add_argument("--inventory", help="default: inventory.ini")
    parser.add_argument("--facts", help="a file of facts, instead of the machines' answers")
    parser.add_argument("--save", help="write the facts to this file, for --facts")
    args, extra = parser.parse_known_args(argv)
    if args.facts and extra:
        parser.error(f"{' '.join(extra)} goes to ansible-playbook, which --facts does not run")
    table = yaml.safe_load((ANSIBLE / "stacks.yml").read_text())["stacks"]
    try:
        entries = (
            read_facts_file(args.facts) if args.facts else collect_facts(args.inventory, extra)
        )
        if args.save:
            Path(args.save).write_text(json.dumps(entries, indent=1) + "\n")
        printed = plan_rows(entries, table, ROOT / "bundle")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except PlanError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    print(format_rows(printed))
    refused = any(line.startswith("REFUSED") for row in printed for line in row["lines"])
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(interrupts.run_main(main))
