"""Says all that is wrong with the machines of the inventory, and changes nothing: `make check`.

Exit code 0: nothing is wrong; 1: problems were found; 2: it could not look.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAYBOOK = ROOT / "ansible" / "playbooks" / "check.yml"


class CannotLook(Exception):
    """A sentence for the user."""


def look(inventory, extra):
    """The findings of all machines. Raises CannotLook with Ansible's own words."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        output = Path(folder) / "findings.json"
        argv = [
            str(Path(sys.executable).parent / "ansible-playbook"),
            str(PLAYBOOK),
            "--extra-vars",
            json.dumps({"check_output": str(output)}),
        ]
        argv += ["--inventory", inventory] if inventory else []
        argv += extra
        environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
        done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        if not output.exists():
            raise CannotLook(f"{done.stdout}\ntandem: ansible-playbook could not look (above)")
        return json.loads(output.read_text())


def text(findings, width=80):
    """What people read: a paragraph a finding, the machines in the order of the inventory."""
    if not findings:
        return "Nothing is wrong with the machines."
    lines, host = [], None
    for finding in findings:
        if finding["host"] != host:
            host = finding["host"]
            lines.append(host)
        for word in ("cause", "remedy"):
            sentence = finding[word][:1].upper() + finding[word][1:]
            first = "  - " if word == "cause" else "    Remedy: "
            lines += textwrap.wrap(
                f"{first}{sentence}", width, subsequent_indent="    ", break_long_words=False
            )
    lines.append(f"Problems: {len(findings)}. Nothing was changed.")
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Say all that is wrong with the machines.")
    parser.add_argument("--inventory", help="default: inventory.ini")
    parser.add_argument("--json", action="store_true", help="a list of findings, for scripts")
    args, extra = parser.parse_known_args(argv)
    try:
        findings = look(args.inventory, extra)
    except CannotLook as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(findings, indent=2) if args.json else text(findings))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
