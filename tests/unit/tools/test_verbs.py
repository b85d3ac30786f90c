"""The table of verbs, the one reader of what is typed, and the Makefile that hands words on: by the
real make, with stubs for the tools."""

import ast
import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from contract import options, verbs
from contract.command_line import verb_words
from contract.errors import UserError
from launcher import cli, folders, run, terminal
from launcher.terminal import Terminal
from launcher.watch import failures
from launcher.watch.failures import Failure
from report.__main__ import main as report_main
from tools import verbs as tool

ROOT = Path(__file__).parents[3]

# What a program of the checkout was called with, one JSON list a call.
STUB = """#!/usr/bin/python3 -IS
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([os.path.relpath(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
NASTY = 'it\'s a "test" `touch pwned` $(touch pwned) $(shell touch pwned) $HOME $$ ; touch pwned #'


def check(*words):
    """What `make` says before anything begins of what was typed."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    verbs_typed = [word for word in words if "=" not in word]
    return tool.check(verbs_typed, {"TANDEM_GIVEN": " ".join(given), **given})


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose environments and scripts are stubs, with the real Makefile and table."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "tools" / "verbs.py", tmp_path / "tools")
    (tmp_path / "contract").mkdir()
    for path in (ROOT / "contract").glob("*.*"):
        shutil.copy(path, tmp_path / "contract")
    stubs = ["tools/venv.sh", "tools/test.sh", "tools/all_tests.py", "tools/test-gpu.sh"]
    for environment in (".venv", ".venv-core2.16", ".venv-core2.21"):
        stubs += [f"{environment}/bin/python", f"{environment}/bin/ansible-playbook"]
    for name in stubs:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STUB)
        path.chmod(0o755)
    return tmp_path


def make(checkout, *words, **environment):
    """(what make printed, exit code, the calls that it made)."""
    calls = checkout / "calls"
    calls.unlink(missing_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", *words],
        cwd=checkout,
        env={**clean, "CALLS": str(calls), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done.stdout, done.returncode, [json.loads(line) for line in lines]


def last_call(checkout, *words, **environment):
    printed, code, calls = make(checkout, *words, **environment)
    assert code == 0, printed
    return calls[-1]


@pytest.mark.parametrize(
    ("verb", "name", "call"),
    [
        ("train", "DATA", ["train", f"DATA={NASTY}"]),
        ("bootstrap", "LOGIN", ["ansible/bootstrap.py", f"--login={NASTY}"]),
    ],
)
def test_no_shell_and_no_make_reads_a_value(checkout, verb, name, call):
    assert last_call(checkout, verb, f"{name}={NASTY}")[-2:] == call
    assert not (checkout / "pwned").exists()


def test_a_list_of_machines_is_refused_before_a_sweep_and_not_before_it_goes_on(checkout):
    looked = [".venv/bin/python", "-m", "launcher", "inventory"]
    assert looked in make(checkout, "sweep", "SWEEP=SYNC=a,b")[2]
    assert looked not in make(checkout, "sweep", "RESUME=latest")[2]
    assert [*looked, "LIMIT=pc3"] in make(checkout, "wake", "LIMIT=pc3")[2]


def test_another_ansible_runs_what_talks_to_machines(checkout):
    _, _, calls = make(checkout, "check", "CORE=2.16")
    folder = ".venv-core2.16/bin"
    assert calls == [
        ["tools/venv.sh", "control"],
        ["tools/venv.sh", "core2.16"],
        [".venv/bin/python", "-m", "launcher", "inventory"],
        [f"{folder}/python", "ansible/check.py"],
    ]
    assert last_call(checkout, "provision", "CORE=2.16")[0] == f"{folder}/ansible-playbook"
    assert last_call(checkout, "provision")[0] == ".venv/bin/ansible-playbook"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "NODE=2"], "there is no variable NODE: did you mean NODES?"),
        (["status", "NODES=2"], "make status does not take NODES; it takes RUN JSON (make help"),
        (["train", "LR=0.1"], "LR=0.1 is an option of the trainer: ARGS='--lr 0.1'"),
        (["train", "GPUS=2"], "GPUS=2: the inventory sets how many GPUs a machine uses:"),
        (["check", "LR=0.1"], "there is no variable LR"),
        (["runs", "RUN=x"], "make runs does not take RUN; it takes no variable (make help runs)."),
        (["trian"], "there is no command trian: did you mean train?"),
        (["plan", "NODES=x"], "NODES=x is not a whole number: write, for example, NODES=4."),
        (["train", "FORCE=perhaps"], "FORCE=perhaps is not on or off:"),
        (["check", "CORE=2.17"], "CORE=2.17: choose one of 2.16, 2.21, or leave it out."),
        (["train", "EPOCHS=0"], "EPOCHS=0: must be at least 1."),
        (["train", "ARGS=--name 'a"], "ARGS=--name 'a is not text with every quote closed:"),
        (["train", "MODEL=a\n#SBATCH x"], "MODEL contains a line break or another control"),
    ],
)
def test_a_mistake_is_one_sentence(words, said):
    with pytest.raises(UserError) as refused:
        check(*words)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("words", [["train", "NODE=2"], ["help", "trian"]])
def test_after_a_mistake_nothing_begins(checkout, words):
    printed, code, calls = make(checkout, *words)
    first, *rest = printed.splitlines()
    assert first.startswith("tandem: there is no")
    assert all(line.startswith("make: ***") for line in rest)
    assert (code, calls) == (2, [])


@functools.cache
def ansible_options():
    """The options of ansible-playbook."""
    program = Path(sys.executable).parent / "ansible-playbook"
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    return {*re.findall(r"--[-\w]+", done.stdout)}


OURS = (
    *("launcher", "report", "trainer.export"),
    *("tools.sweep", "tools.imagenet", "tools.shrink", "tools.tensorboard"),
)
VALUES = {
    **{"SCRIPT": "-m package.train", "AT": "19:00", "UNTIL": "19:00", "RUN": "-no such run"},
    **dict.fromkeys(("ARGS", "RUNS"), "--no-such 'a b'"),
}
TYPES = {options.integer: "17", options.switch: "1"}


def value_of(name, option):
    plain = VALUES.get(name) or TYPES.get(option.type, "no such thing")
    return option.choices[-1] if option.choices else plain


# A bundle of a script's packages is another program's.
EVERYTHING = {verb: [*row.variables] for verb, row in verbs.VERBS.items() if row.takes}
EVERYTHING["bundle"] = ["INVENTORY", "FORCE"]


@pytest.mark.parametrize(("verb", "names"), [*EVERYTHING.items(), ("bundle", ["SCRIPT"])])
def test_what_is_typed_is_what_the_tool_reads(checkout, verb, names):
    """Through the real make: each verb, with each variable."""
    variables = {name: verbs.VERBS[verb].variables[name] for name in names}
    typed = {name: value_of(name, option) for name, option in variables.items()}
    words = [f"{name}={value}" for name, value in typed.items()]
    call = last_call(checkout, verb, *words)
    if call[0] == "tools/all_tests.py" or (call[0].endswith("python") and call[2] in OURS):
        assert {*words} <= {*call}
        return
    if "CORE" in typed:
        assert f".venv-core{typed.pop('CORE')}/bin" in call[0]
    program = "" if call[0].endswith(".sh") else (ROOT / call[1]).read_text()
    own = {*re.findall(r'add_argument\(\s*"([^"]+)', program)}
    for name, value in typed.items():
        flag = f"--{name.lower().replace('_', '-')}".replace("ask-sudo", "ask-become-pass")
        switch = variables[name].type is options.switch
        if name in tool.EXTRA_VARS:
            assert json.dumps({tool.EXTRA_VARS[name]: True}) in call
        else:
            assert (flag if switch else f"{flag}={value}") in call
            assert call[0].endswith(".sh") or flag in own | ansible_options(), name


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """Two runs that are over, of which `latest` is the newer."""
    runs = tmp_path / "runs"
    for name in ("20260101T000000Z-old-1n", "20260102T000000Z-new-1n"):
        (runs / name).mkdir(parents=True)
        (runs / name / "plan.json").write_text("{}")
    (runs / "latest").symlink_to("20260102T000000Z-new-1n")
    monkeypatch.setattr(folders, "RUNS", runs)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("verb", ["status", "attach", "stop"])
def test_a_verb_acts_on_the_run_that_was_named_or_on_none(two_runs, capsys, verb):
    def said(name):
        code = cli.main([verb, f"RUN={name}"])
        told = capsys.readouterr()
        return code, told.out + told.err

    code, told = said("20260101T000000Z-old-1n")
    assert "-new-" not in told and (verb == "attach" or "-old-" in told)
    code, told = said("nosuch")
    assert code == 2 and "has no run nosuch" in told
    assert report_main(["RUN=nosuch"]) == 2


ROOMS = ("contract", "launcher", "report", "tandem", "trainer", "examples", "tools")


def texts(node):
    """Every text of a program but its docstrings; what an f-string puts in is `1`."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values
        )
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def printed():
    """(file, text) of every text of the programs that says `make` and a verb."""
    known = "|".join(sorted([*verbs.VERBS, *tool.INTERNAL]))
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            source = path.read_text()
            for text in texts(ast.parse(source)) if "make " in source else ():
                if re.search(rf"\bmake ({known})\b", text) and path != ROOT / "contract/verbs.py":
                    yield path.relative_to(ROOT), text


def test_every_command_that_is_printed_can_be_typed():
    """In backticks stands what can be typed; a variable stands nowhere else."""
    seen = 0
    for path, text in printed():
        for command in verbs.find_commands(text):
            verb, *words = shlex.split(re.sub(r"<[^>]*>", "x", command))
            if verb == "help":
                assert set(words) < set(verbs.VERBS)
                continue
            check(verb, *words)
            seen += 1
        assert not re.search(r"\bmake [a-z-]+ [A-Z_]+=", re.sub(r"`[^`]*`", "", text)), (path, text)
    assert seen > 20


def test_what_is_printed_keeps_the_list_of_machines(monkeypatch, capsys):
    """Wherever it is printed: what a refusal says, what a run says, what a failure's remedy is."""

    def refuse(options):
        raise UserError("pc1: torch is missing: run `make provision`, or `make env` here.")

    monkeypatch.setattr(run, "train", refuse)
    assert cli.main(["train", "--inventory", "my pcs.ini"]) == 2
    provision = "(Add INVENTORY='my pcs.ini' to make provision.)"
    assert f"`make env` here. {provision}" in capsys.readouterr().err
    screen = io.StringIO()
    terminal = Terminal(screen)
    terminal.say("run `make provision`, then `make train RESUME=x`")
    terminal.drain()
    run_it = "tandem: run `make provision`, then `make train RESUME=x`"
    assert screen.getvalue() == f"{run_it} {provision}\n"
    failure = Failure("pc1", "exit", 0, exception="No module named 'einops'")
    assert provision in failures.explain_failure(failure)[1]
    assert report_main(["plan", "--runs", "none", "--model", "resnet50"]) == 3
    assert "(Add INVENTORY='my pcs.ini' to make plan.)" in capsys.readouterr().err
    assert cli.main(["train"]) == 2
    assert "Add INVENTORY" not in capsys.readouterr().err


def test_a_command_is_never_broken_in_two():
    text = "its environment lacks torch, so run `make provision INVENTORY=examples/demo.ini` there"
    lines = terminal.wrap_sentence(text, 60)
    assert max(map(len, lines)) <= 60 and " ".join(map(str.strip, lines)) == f"tandem: {text}"
    assert any("`make provision INVENTORY=examples/demo.ini`" in line for line in lines)
    assert terminal.wrap_sentence(text, 0) == [f"tandem: {text}"]
    quoted = "LR=0.1 is an option of the trainer: ARGS='--lr 0.1 --seed 3'; leave the other one out"
    for width in range(45, 80):
        assert any(
            "ARGS='--lr 0.1 --seed 3'" in line for line in terminal.wrap_sentence(quoted, width)
        )
    assert terminal.wrap_sentence("  File 'x',   line 3" + " y" * 60, 60) == [
        "tandem:   File 'x',   line 3" + " y" * 60
    ]


def test_words_for_off_switch_off(checkout):
    words = ("FORCE=0", "DETACH=no", "QUEUE=off", "PORT=")
    off = dict.fromkeys(("force", "detach", "queue"), False)
    assert verb_words("train", last_call(checkout, "train", *words)[4:], "it") == off
    assert tool.options("provision", {"TANDEM_GIVEN": "DELETE", "DELETE": "0"}) == []


def test_what_a_shell_exported_is_named_and_not_used(checkout):
    printed, code, calls = make(checkout, "train", "NODES=2", MODEL="vgg16", NODES="9", LOGIN="me")
    assert (code, calls[-1][4:]) == (0, ["NODES=2"])
    assert printed.splitlines() == [
        "tandem: MODEL=vgg16 in your shell's environment is not used: "
        "type it after make: make train MODEL=vgg16"
    ]


def test_ansible_has_this_checkouts_settings_and_the_users_vault(checkout):
    """Of a folder to which everybody may write it reads no ansible.cfg that nothing names."""
    stub = checkout / ".venv/bin/ansible-playbook"
    stub.write_text("#!/bin/sh\nenv | grep ^ANSIBLE_ | grep -v ^ANSIBLE_HOME= > env\n")
    foreign = ("CONFIG", "ROLES_PATH", "LIBRARY", "INVENTORY", "HOST_KEY_CHECKING")
    shell = {f"ANSIBLE_{name}": "/srv/other" for name in (*foreign, "VAULT_PASSWORD_FILE")}
    printed, code, _ = make(checkout, "provision", **shell)
    assert code == 0, printed
    assert sorted((checkout / "env").read_text().splitlines()) == [
        f"ANSIBLE_CONFIG={checkout}/ansible.cfg",
        "ANSIBLE_VAULT_PASSWORD_FILE=/srv/other",
    ]


def test_help_starts_nothing_and_lists_every_verb(checkout):
    printed, code, calls = make(checkout, "help", "train")
    assert (code, calls) == (0, [])
    assert all(name in printed for name in verbs.VERBS["train"].variables)
    printed, code, _ = make(checkout, "help", "data/digits")  # no verb of a person
    assert code == 0 and "make VERB NAME=value" in printed
    lists = [verbs.list_verbs(), verbs.list_verbs(develop=True)]
    texts = [verbs.help_text(f"make {name}", verbs.VERBS[name]) for name in verbs.VERBS]
    for text in (*lists, *texts):
        assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"^  (\S+) ", "\n".join(lists), re.M) == [*verbs.VERBS]
    assert lists[0].count("\n") < 48


OLD = "import runpy, sys; sys.version_info = (3, 6, 9); runpy.run_module('tools.verbs')"


def test_an_old_python_is_refused_in_a_sentence():
    """`make` calls whatever python3 is: 3.6 is that of Ubuntu 18.04."""
    argv = [sys.executable, "-c", OLD]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode and re.fullmatch("tandem: python3 is too old.*\n", done.stderr)


def test_the_table_and_the_makefile_have_the_same_verbs():
    text = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^([a-z][a-z/ -]*):(?!=)", text, re.M)
    made = {name for rule in rules for name in rule.split()}
    assert made == {*verbs.VERBS, *tool.INTERNAL}


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_the_example_of_a_verb_can_be_typed_on_the_shipped_files(verb):
    make, named, *words = shlex.split(verbs.VERBS[verb].example)
    assert (make, named) == ("make", verb)
    if verb == "help":
        assert words == ["train"]
        return
    given = dict(word.split("=", 1) for word in words)
    assert check(verb, *words) == []
    for name in {"INVENTORY", "FACTS", "SCRIPT"} & set(given):
        assert (ROOT / given[name]).is_file()
