"""All sentences that users meet, as reviewed files: a change of words is one diff to read.

A module beside this one renders those of its room: `render()` -> {code: sentence}. `make snapshots`
writes the files anew.
"""

import importlib
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOMS = sorted(path.stem for path in HERE.glob("[a-z]*.py") if path.stem != "test_messages")


@pytest.mark.parametrize("room", ROOMS)
def test_sentences_are_those_that_were_reviewed(room):
    sentences = importlib.import_module(f"tests.messages.{room}").render()
    text = "".join(f"[{code}]\n{sentence}\n\n" for code, sentence in sentences.items())
    path = HERE / f"{room}.txt"
    if os.environ.get("TANDEM_SNAPSHOTS") == "write":
        path.write_text(text)
    assert path.read_text() == text, f"read the difference, then: make snapshots ({room})"
