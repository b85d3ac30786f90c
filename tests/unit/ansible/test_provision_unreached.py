"""What `make check` and Ansible's screen say of machines that do not answer, or lie."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import UserError
from tests.unit.ansible.provision_machines import ROOT, ansible_playbook, load

ANSIBLE = ROOT / "ansible"
check = load("ansible/check.py")


def test_what_ansible_says_first_is_the_reason():
    printed = "PLAY [x] ***\n[ERROR]: the inventory is broken.\nOrigin: a:1\n\nfatal: [b]: no\n"
    assert check.reason(printed).startswith("the inventory is broken. To see the whole output")


def test_looking_is_not_silent_and_tells_the_task(monkeypatch, tmp_path):
    script = tmp_path / "slow.py"  # it ends after two lines of progress
    script.write_text(
        "import sys\n"
        "print('TASK [preflight : Ask for facts] ****', flush=True)\n"
        "open(sys.argv[1]).read()\n"
    )
    fifo, told = tmp_path / "fifo", []
    os.mkfifo(fifo)

    def say_progress(text, **_):
        told.append(text)
        if len(told) == 2:
            fifo.open("w").close()

    monkeypatch.setattr(check, "print", say_progress, raising=False)
    printed = check.run_playbook([sys.executable, str(script), str(fifo)], None, interval=0.5)
    assert printed.startswith("TASK [preflight")
    assert told[-1].endswith("s so far, at: preflight : Ask for facts")


def test_what_is_only_to_be_known_is_said_once_and_is_no_problem(monkeypatch, capsys):
    note = {"fault": "one_user", "cause": "tandem trains there", "remedy": "train_user=tandem"}
    notes = [{"host": host, **note} for host in ("pc1", "pc2")]
    monkeypatch.setattr(check, "inspect", lambda *_: {"findings": notes, "local": []})
    assert (check.main([]), check.main(["--json"])) == (0, 0)
    said = capsys.readouterr().out
    assert said.startswith("make check found no problems.\nNote on pc1, pc2:\n  - Tan")
    assert said.count("Remedy: train_user=tandem") == 1
    assert json.loads(said[said.index("{") :]) == {"findings": []}


def test_findings_come_in_the_order_of_the_inventory_without_control_characters(monkeypatch):
    note = {"fault": "reboot_waits", "cause": "kernel 7\x1b[2J waits", "remedy": "sudo reboot"}
    written = {
        "findings": [{"host": "pc2", "fault": "xid", "cause": "b", "remedy": "c"},
                     {"host": "pc1", **note}],
        "local": [],
        "order": ["pc1", "pc2"],
    }  # fmt: skip

    def ansible(argv, environment):
        output = json.loads(argv[argv.index("--extra-vars") + 1])["check_output"]
        Path(output).write_text(json.dumps(written))
        return ""

    monkeypatch.setattr(check, "run_playbook", ansible)
    found = check.inspect(None, [])
    assert [finding["host"] for finding in found["findings"]] == ["pc1", "pc2"]
    said = check.text(**found)
    assert said.startswith("pc2\n  - B\n    Remedy: c\nProblems: 1. Nothing was changed.\n")
    assert "Note on pc1:\n  - Kernel 7 [2J waits\n" in said


@pytest.mark.parametrize("asked", [[], ["--json"]])
def test_json_is_json_when_it_could_not_look_either(monkeypatch, capsys, asked):
    def inspect(inventory, extra):
        raise UserError("could not check the machines: no such file")

    monkeypatch.setattr(check, "inspect", inspect)
    assert check.main(asked) == 2
    said = capsys.readouterr()
    assert said.err == "tandem: could not check the machines: no such file\n"
    if asked:
        (finding,) = json.loads(said.out)["findings"]
        assert (finding["fault"], "no such file" in finding["cause"]) == ("cannot_look", True)
    else:
        assert said.out == ""


# What a machine can print in the place of every module.
LIAR = r"""#!/usr/bin/python3
import json
T = "\x1b]0;title\x07\x1b]52;c;b3duZWQ=\x1b\\\x9b2J\x1b[2J\x1b[31mred\u202e\r "
print(json.dumps({"failed": True, "msg": T, "warnings": [T + "warning"], "exception": T, "say": T,
                  "deprecations": [{"msg": T, "version": None}], "rows": [T + "row"]}))
"""
SAYING = """
- name: "Words of a machine"
  hosts: all
  gather_facts: false
  tasks:
    - {name: Lie, liar: {}, register: said, ignore_errors: true}
    - {name: Say, ansible.builtin.debug: {msg: "{{ said.say }}"}}
    - {name: Say all, ansible.builtin.debug: {msg: "{{ said }}"}}
    - {name: Rows, ansible.builtin.debug: {msg: row}, loop: "{{ said.rows }}"}
    - {name: Fail, ansible.builtin.fail: {msg: "{{ said.say }}"}, ignore_errors: true}
    - name: Mistake
      ansible.builtin.debug: {msg: "{{ (said.say ~ '{') | from_json }}"}
"""


def test_a_machines_words_are_no_orders_for_the_terminal(tmp_path):
    """Warnings, errors, results and labels of loops, by Ansible itself."""
    (tmp_path / "liar.py").write_text(LIAR)
    modules = ("--module-path", str(tmp_path))
    done = ansible_playbook(tmp_path, SAYING, *modules, ANSIBLE_FORCE_COLOR="1")
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "warning" in said and "(item=" in said and "red" in said
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert not set(re.sub(r"[\n\t]", "", plain)) & set(map(chr, [*range(32), *range(127, 160)]))
    assert "\u202e" not in said and "Traceback" not in said
    # The end has a line a machine that fits.
    (line,) = re.findall(r"^localhost +: .*", plain, re.MULTILINE)
    assert re.fullmatch(
        r"localhost : ok=\d changed=0 unreachable=0 failed=1", " ".join(line.split())
    )
    assert len(line) <= 80


NOBODY = "No machine of the inventory is without internet, so nobody needs a bundle: FORCE=1 if so."
REFUSING = f"""
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.fail: {{msg: "{NOBODY}"}}
      ignore_errors: true
    - ansible.builtin.assert: {{that: inventory_hostname != 'pc1', fail_msg: "{NOBODY}"}}
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.fail: {{msg: "{NOBODY}"}}
"""


def test_what_a_playbook_refuses_is_its_sentence_alone(tmp_path):
    """By Ansible itself, in a terminal; a failure that is ignored shows all of it."""
    screen, terminal = os.openpty()
    (tmp_path / "book.yml").write_text(REFUSING)
    argv = [Path(sys.executable).with_name("ansible-playbook"), tmp_path / "book.yml"]
    argv += ["--inventory", "pc1,localhost,"]
    plain = {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "COLUMNS": "80"}
    shown = {"stdout": terminal, "stderr": subprocess.STDOUT, "env": {**os.environ, **plain}}
    assert subprocess.run([*argv, "--connection", "local"], **shown).returncode == 2
    ends = os.read(screen, 1 << 16).decode().replace("\r", "").rpartition("...ignoring")[2]
    os.close(screen)
    os.close(terminal)
    assert "[ERROR]" not in ends and "Origin" not in ends and "FAILED! =>" not in ends
    assert f"\nfatal: [pc1]: {NOBODY}\n" in ends.replace("\n  ", " ")
    assert f"\n{NOBODY}\n" in ends.replace("\n  ", " ")
    refusal = ends[ends.index("fatal:") : ends.index("PLAY RECAP")]
    assert max(map(len, refusal.splitlines())) <= 80


@pytest.mark.parametrize("script", ["check", "bootstrap", "dry_provision", "wake", "bundle"])
def test_ctrl_c_ends_a_program_without_a_traceback(tmp_path, script):
    """The program itself, whose first step (to read its arguments) is interrupted."""
    (tmp_path / "sitecustomize.py").write_text(
        "import argparse\n"
        "def interrupt(*_, **__): raise KeyboardInterrupt\n"
        "argparse.ArgumentParser.parse_known_args = interrupt\n"
    )
    argv = [sys.executable, ANSIBLE / f"{script}.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert "tandem: interrupted" in done.stderr
