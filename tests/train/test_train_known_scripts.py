"""The commands of docs/own-script.md for scripts that readers fetch: dry-run on stand-ins, of
which each has the real one's place, its imports and the options that the command gives it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fabric", reason="a run needs the control machine's environment")
pytestmark = pytest.mark.long
CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs/own-script.md").read_text()
COMMANDS = re.findall(r"^make train SCRIPT=~.*(?:\n  .*)*", PAGE, re.M)
# Script, what lies beside it, and those of its options that the page's commands use: written here
# after the page, so that they show that the commands reach a parser, not that the real one is so.
STANDINS = {
    "vision/references/classification": (
        ["presets", "transforms", "utils"],
        ["--data-path", "--model", "--batch-size", "--output-dir", "--resume"],
    ),
    "timm": (
        ["timm/__init__"],
        ["--data-dir", "--model", "--batch-size", "--amp", "--output", "--resume", "--local-rank"],
    ),
    "vision/references/detection": (
        ["coco_utils", "engine", "utils"],
        ["--data-path", "--dataset", "--model", "--output-dir", "--resume"],
    ),
}


@pytest.fixture
def home(tmp_path):
    """A home folder with the stand-ins."""
    for folder, (beside, options) in STANDINS.items():
        place = tmp_path / folder
        place.mkdir(parents=True)
        for module in beside:
            (place / f"{module}.py").parent.mkdir(exist_ok=True)
            (place / f"{module}.py").write_text("")
        lines = ["import argparse, torch, torchvision"]
        lines += [f"import {module.partition('/')[0]}" for module in beside]
        lines += ["parser = argparse.ArgumentParser()"]
        for option in options:
            more = ', action="store_true"' if option == "--amp" else ""
            lines.append(f'parser.add_argument("{option}"{more})')
        (place / "train.py").write_text("\n".join([*lines, "print(parser.parse_args())", ""]))
    return tmp_path


def test_there_is_a_command_for_each():
    folders = [re.search(r"FOLDER=~/(\S+)", command)[1] for command in COMMANDS]
    assert folders == list(STANDINS)


@pytest.mark.parametrize("command", COMMANDS, ids=list(STANDINS))
def test_what_is_written_starts_the_script_with_options_that_it_has(home, command):
    words = shlex.split(command.replace("\\\n", " ").replace("~/", f"{home}/"))
    given = dict(word.split("=", 1) for word in words[2:])
    more = ["INVENTORY=examples/demo.ini", "NODES=2", "QUEUE=1"]
    argv = ["make", "--silent", "dry-run", *words[2:], *more]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    starts = [line for line in done.stdout.splitlines() if line.startswith("cd ")]
    assert len(starts) == 2
    for line in starts:
        assert line.endswith(f"--use_env train.py {given['ARGS']}")
        # timm's parser has the option by which launch says the local rank.
        assert ("TANDEM_LOCAL_RANK=--local-rank" in line) == ("timm" in given["SCRIPT"])
    last = f"{given['OUTPUT']}/last.pth"
    later = shlex.split(given["RESUME_ARGS"].replace("{last}", last))
    own = [sys.executable, given["SCRIPT"], *shlex.split(given["ARGS"]), *later]
    told = subprocess.run(own, capture_output=True, text=True, env={**os.environ, "HOME": "/"})
    assert told.returncode == 0, told.stderr
    assert f"resume='{last}'" in told.stdout and "model=" in told.stdout
