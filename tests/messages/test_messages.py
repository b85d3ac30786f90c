"""All sentences that users meet, as reviewed files: a change of words is one diff to read.

A module beside this one renders those of its room: `render()` -> {code: sentence}. `make snapshots`
writes the files anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROOMS = sorted(path.stem for path in HERE.glob("[a-z]*.py") if path.stem != "test_messages")


@pytest.mark.parametrize("room", ROOMS)
def test_sentences_are_those_that_were_reviewed(room):
    # In a process of its own: Ansible changes Python's insides when it is imported, and torch then
    # cannot be.
    code = f"import json; from tests.messages import {room}; print(json.dumps({room}.render()))"
    argv, path = [sys.executable, "-c", code], f"{ROOT}:{ROOT}/ansible"
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    sentences = json.loads(done.stdout.splitlines()[-1])
    text = "".join(f"[{code}]\n{sentence}\n\n" for code, sentence in sentences.items())
    path = HERE / f"{room}.txt"
    if os.environ.get("TANDEM_SNAPSHOTS") == "write":
        path.write_text(text)
    assert path.read_text() == text, f"read the difference, then: make snapshots ({room})"
