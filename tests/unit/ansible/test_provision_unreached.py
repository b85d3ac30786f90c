"""What `make check` and Ansible's screen say of machines that do not answer, or lie."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ANSIBLE = Path(__file__).parents[3] / "ansible"
sys.path.insert(0, str(ANSIBLE))  # as for a user who runs check.py directly


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = loaded(ANSIBLE / "check.py")


def test_what_ansible_says_first_is_the_reason():
    printed = "PLAY [x] ***\n[ERROR]: the inventory is broken.\nOrigin: a:1\n\nfatal: [b]: no\n"
    assert check.reason(printed) == (
        "the inventory is broken. To see all of it: ansible-playbook ansible/playbooks/check.yml"
    )


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
    printed = check.run_playbook([sys.executable, str(script), str(fifo)], None, every=0.5)
    assert printed.startswith("TASK [preflight")
    assert told[-1].endswith("s so far, at: preflight : Ask for facts")


def test_what_is_only_to_be_known_is_said_once_and_is_no_problem(monkeypatch, capsys):
    note = {"fault": "one_user", "cause": "tandem trains there", "remedy": "train_user=tandem"}
    notes = [{"host": host, **note} for host in ("pc1", "pc2")]
    monkeypatch.setattr(
        check, "inspect", lambda *_: {"findings": notes, "machines": [], "local": []}
    )
    assert (check.main([]), check.main(["--json"])) == (0, 0)
    said = capsys.readouterr().out
    assert said.startswith("Nothing is wrong with the machines.\nNote on pc1, pc2:\n  - Tan")
    assert said.count("Remedy: train_user=tandem") == 1 and json.loads(said[said.index("{") :]) == {
        "findings": [],
        "machines": [],
    }


@pytest.mark.parametrize("asked", [[], ["--json"]])
def test_json_is_json_when_it_could_not_look_either(monkeypatch, capsys, asked):
    def inspect(inventory, extra):
        raise check.InspectionError("could not look at the machines: no such file")

    monkeypatch.setattr(check, "inspect", inspect)
    assert check.main(asked) == 2
    said = capsys.readouterr()
    assert said.err == "tandem: could not look at the machines: no such file\n"
    if asked:
        (finding,) = json.loads(said.out)["findings"]
        assert (finding["fault"], "no such file" in finding["cause"]) == ("cannot_look", True)
    else:
        assert said.out == ""


@pytest.fixture
def screen(monkeypatch):
    """(the callback, what it displayed)."""
    module = loaded(ANSIBLE / "callback_plugins" / "tandem.py")
    callback, shown = module.CallbackModule(), []
    monkeypatch.setattr(callback, "_display", types.SimpleNamespace(display=shown.append))
    return callback, shown


def result(role, action="ansible.builtin.fail", **fields):
    named = None if role is None else types.SimpleNamespace(get_name=lambda: role)
    task = types.SimpleNamespace(_role=named, action=action)
    return types.SimpleNamespace(_task=task, _result=fields)


def test_role_reach_speaks_in_sentences_of_80_columns(screen):
    callback, shown = screen
    callback.v2_playbook_on_task_start(result("reach")._task, False)
    callback.v2_runner_on_unreachable(result("reach", msg="No route to host"))
    callback.v2_runner_item_on_ok(result("reach"))
    callback.v2_playbook_on_task_start(result("reach")._task, False)
    assert shown == ["Asking the machines whether they answer: 10 s if one of them is off."]
    shown.clear()
    long = "SET ASIDE: node1: 192.168.56.111 did not answer: No route to host. Remedy: is it on?"
    callback.v2_runner_on_failed(result("reach", msg=["No machine answers.", long]))
    callback.v2_runner_on_ok(result("reach", action="ansible.builtin.debug", msg=["Again."]))
    assert shown[0] == "No machine answers."
    assert " ".join(shown[1].split()) == long
    assert max(len(line) for text in shown for line in text.splitlines()) <= 80
    assert shown[2] == "Again."


def test_other_roles_are_shown_as_ansible_does(screen, monkeypatch):
    callback, _ = screen
    told = []
    base = type(callback).__mro__[1]
    for name in ("v2_runner_on_ok", "v2_runner_on_unreachable", "v2_runner_item_on_ok"):
        monkeypatch.setattr(base, name, lambda self, one, name=name: told.append(name))
        for role in ("driver", None):
            getattr(callback, name)(result(role))
    assert len(told) == 6


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


@pytest.mark.parametrize("colour", ["0", "1"])
def test_a_machines_words_are_no_orders_for_the_terminal(tmp_path, colour):
    """Warnings, errors, results and labels of loops, by Ansible itself."""
    (tmp_path / "liar.py").write_text(LIAR)
    (tmp_path / "play.yml").write_text(SAYING)
    words = ["--inventory", "pc1,", "--connection", "local", "--module-path", str(tmp_path)]
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), *words, tmp_path / "play.yml"],
        cwd=ANSIBLE.parent,
        env={**os.environ, "ANSIBLE_FORCE_COLOR": colour},
        capture_output=True,
    )
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 2 and "warning" in said and "(item=" in said and "red" in said
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert not set(re.sub(r"[\n\t]", "", plain)) & set(map(chr, [*range(32), *range(127, 160)]))
    assert "\u202e" not in said and "Traceback" not in said


def test_the_end_of_a_play_has_a_line_a_machine_that_fits(tmp_path):
    """By Ansible itself; the machines are this one under two names."""
    (tmp_path / "pcs.ini").write_text(
        "[cluster]\npc1 ansible_connection=local\npc2 ansible_connection=local\n"
    )
    (tmp_path / "book.yml").write_text(
        "- hosts: cluster\n  gather_facts: false\n  tasks:\n"
        "    - name: Fail on one\n      ansible.builtin.assert:\n"
        "        that: inventory_hostname == 'pc1'\n"
    )
    done = subprocess.run(
        [
            *(Path(sys.executable).parent / "ansible-playbook", tmp_path / "book.yml"),
            *("--inventory", tmp_path / "pcs.ini"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_CONFIG": str(ANSIBLE.parent / "ansible.cfg")},
    )
    end = done.stdout.partition("PLAY RECAP")[2].splitlines()[1:]
    assert [" ".join(line.split()) for line in end if line] == [
        "pc1 : ok=1 changed=0 unreachable=0 failed=0",
        "pc2 : ok=0 changed=0 unreachable=0 failed=1",
    ]
    assert max(map(len, end)) <= 80 and done.returncode == 2


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


@pytest.mark.parametrize("words", [[], ["-v"]])
def test_what_a_playbook_refuses_is_its_sentence_alone(tmp_path, words):
    """By Ansible itself; -v shows all of it, as does a failure that is ignored."""
    (tmp_path / "book.yml").write_text(REFUSING)
    screen, terminal = os.openpty()
    command = [Path(sys.executable).with_name("ansible-playbook"), tmp_path / "book.yml", *words]
    plain = {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_CONFIG": str(ANSIBLE.parent / "ansible.cfg")}
    for shown in (subprocess.PIPE, terminal):
        done = subprocess.run(
            [*command, "--inventory", "pc1,localhost,", "--connection", "local"],
            stdout=shown,
            stderr=subprocess.STDOUT,
            check=False,
            env={**os.environ, **plain, "COLUMNS": "80"},
        )
        said = (done.stdout or os.read(screen, 1 << 16)).decode().replace("\r", "")
        assert done.returncode == 2
        ends = said.rpartition("...ignoring")[2]
        assert ("fatal: [pc1]: FAILED! => " in ends) == bool(words)
        if not words:
            assert "[ERROR]" not in ends and "Origin" not in ends
            assert f"\nfatal: [pc1]: {NOBODY}\n" in ends.replace("\n  ", " ")
            assert f"\n{NOBODY}\n" in ends.replace("\n  ", " ")
            refusal = ends[ends.index("fatal:") : ends.index("PLAY RECAP")]
            assert (max(map(len, refusal.splitlines())) <= 80) == (shown == terminal)
    os.close(screen)
    os.close(terminal)


@pytest.mark.parametrize("script", ["check", "bootstrap", "dry_provision", "wake", "bundle"])
def test_ctrl_c_ends_a_program_without_a_traceback(tmp_path, script):
    """The program itself, whose first step (to read its arguments) is interrupted."""
    (tmp_path / "sitecustomize.py").write_text(
        "import argparse\n"
        "def interrupt(*_, **__): raise KeyboardInterrupt\n"
        "argparse.ArgumentParser.parse_known_args = interrupt\n"
    )
    done = subprocess.run(
        [sys.executable, ANSIBLE / f"{script}.py"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert "tandem: interrupted" in done.stderr
