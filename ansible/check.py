"""Report the problems of the inventory's machines, and change nothing: `make check`.

This program runs playbooks/check.yml, in which planning/preflight.py finds the problems, and prints
its findings. Exit code 0: there is no problem; 1: there are problems; 2: the machines could not be
checked.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launcher/ is

from contract import interrupts
from contract.errors import UserError
from contract.scratch import scratch_folder
from planning import preflight

ROOT = Path(__file__).resolve().parents[1]
PLAYBOOK = ROOT / "ansible" / "playbooks" / "check.yml"
LOCAL = (
    "{} are nodes on this machine (ansible_connection=local), which need no provisioning: "
    "make env has installed everything."
)


def inspect(inventory, extra):
    """Run the playbook. Returns {"findings", "local": names of the nodes on this machine}.

    "findings" are those of planning/preflight.py, in the order of the inventory. extra: further
    words for ansible-playbook. Raises UserError with Ansible's reason.
    """
    with scratch_folder() as folder:
        output = folder / "findings.json"
        argv = [
            str(Path(sys.executable).parent / "ansible-playbook"),
            str(PLAYBOOK),
            "--extra-vars",
            json.dumps({"check_output": str(output)}),
        ]
        argv += ["--inventory", inventory] if inventory else []
        argv += extra
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_HOST_PATTERN_MISMATCH": "ignore",  # machines that do not answer are findings
        }
        printed = run_playbook(argv, environment)
        # Ansible's exit code is not zero if one machine fails, but the others have findings.
        if not output.exists():
            raise UserError(f"could not check the machines: {reason(printed)}")
        result = json.loads(output.read_text())
    # A single local node is a control node that also trains, and is provisioned like any machine.
    local = result["local"] if len(result["local"]) > 1 else []
    findings = [row for row in result["findings"] if row["host"] not in local]
    findings.sort(key=lambda row: result["order"].index(row["host"]))
    return {"findings": findings, "local": local}


def run_playbook(argv, environment, interval=8.0):
    """Run a command and return its output. Prints the running task every `interval` seconds."""
    start, has_ended, lines = time.monotonic(), threading.Event(), [""]

    def print_progress():
        while not has_ended.wait(interval):
            # "TASK [preflight : Collect facts] ****" -> "preflight : Collect facts"
            tasks = [line for line in lines if line.startswith(("PLAY [", "TASK ["))]
            task = re.sub(r"^\w+ \[|\] \**$", "", tasks[-1].strip()) if tasks else "the inventory"
            seconds = time.monotonic() - start
            sentence = f"tandem: checking: {seconds:.0f} s so far, at: {task}"
            print(sentence, file=sys.stderr, flush=True)

    threading.Thread(target=print_progress, daemon=True).start()
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process:
        lines += process.stdout
    has_ended.set()
    return "".join(lines)


def reason(printed):
    """Extract Ansible's first error from its output, as one line."""
    # "[ERROR]: ...", "ERROR! ..." or "fatal: [pc1]: ..."
    match = re.search(r"^(?:\[ERROR\]:|ERROR!|fatal: \[[^\]]*\]:) (.+)", printed, re.MULTILINE)
    message = match.group(1).strip() if match else "Ansible ended without a reason"
    return (
        f"{message.rstrip('.')}. To see the whole output, type ansible-playbook "
        f"{PLAYBOOK.relative_to(ROOT)}"
    )


def text(findings, local=(), width=80):
    """Write the text for users: a paragraph per finding, and each note once with its machines."""
    problems = preflight.problems(findings)
    lines, host = textwrap.wrap(LOCAL.format(", ".join(local)), width) if local else [], None
    for finding in problems:
        if finding["host"] != host:
            host = finding["host"]
            lines.append(host)
        lines += paragraph(finding, width)
    if problems:
        lines.append(f"Problems: {len(problems)}. Nothing was changed.")
    else:
        lines.append("make check found no problems.")
    # A note is often the same for all machines, so equal notes become one.
    notes = {finding["cause"]: finding for finding in findings if finding not in problems}
    for note in notes.values():
        named = ", ".join(row["host"] for row in findings if row["cause"] == note["cause"])
        lines += [f"Note on {named}:", *paragraph(note, width)]
    return "\n".join(lines)


def paragraph(finding, width):
    """Write the lines of one finding below its machine's name."""
    lines = []
    for word in ("cause", "remedy"):
        # A finding may contain a text of the machine, and with it control characters.
        sentence = "".join(letter if letter.isprintable() else " " for letter in finding[word])
        lead = "    Remedy: "
        # A remedy may begin with a command, so its first letter does not change.
        if word == "cause":
            lead, sentence = "  - ", sentence[:1].upper() + sentence[1:]
        lines += textwrap.wrap(
            f"{lead}{sentence}", width, subsequent_indent="    ", break_long_words=False
        )
    return lines


def main(argv=None):
    parser = argparse.ArgumentParser(description="List all problems of the machines.")
    parser.add_argument("--inventory", help="default: inventory.ini")
    parser.add_argument("--json", action="store_true", help="for scripts")
    args, extra = parser.parse_known_args(argv)
    try:
        result = inspect(args.inventory, extra)
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        if args.json:
            remedy = "remove the cause, then run make check again"
            finding = {"host": "", "fault": "cannot_look", "cause": str(error), "remedy": remedy}
            print(json.dumps({"findings": [finding]}, indent=2))
        return 2
    problems = preflight.problems(result["findings"])
    print(json.dumps({"findings": problems}, indent=2) if args.json else text(**result))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(interrupts.run_main(main))
