"""What TensorBoard is given: records that its own reader takes, from what all machines recorded."""

import json
import struct

import pytest

from report import events
from report.__main__ import main
from report.analysis import analyse
from tests.unit.report.report_runs import RunBuilder


def records(data):
    """Each record of a file, its checksums compared."""
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        assert data[8:12] == events.masked(data[:8])
        yield data[12 : 12 + size]
        assert data[12 + size : 16 + size] == events.masked(data[12 : 12 + size])
        data = data[16 + size :]


@pytest.fixture
def run(tmp_path):
    folder = RunBuilder(tmp_path / "run", steps=2000, gpu=True).write()
    for path in folder.glob("nodes/*/rank*.steps.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "step" and line["step"] % 10 == 0:
                line["loss"] = line["step"] / 1000
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_checksums_and_numbers_are_those_of_the_formats():
    assert events.crc32c(b"123456789") == 0xE3069283  # RFC 3720
    assert events.crc32c(bytes(32)) == 0x8A9136AA
    assert [events.varint(value) for value in (0, 127, 128, 300)] == [
        *(b"\0", b"\x7f", b"\x80\x01", b"\xac\x02")
    ]


def test_a_run_is_a_file_of_events(run, capsys):
    for _ in range(2):
        assert main(["tensorboard", str(run)]) == 0
        assert capsys.readouterr().out.strip() == str(run / "tensorboard")
    (file,) = (run / "tensorboard").iterdir()
    first, *others = records(file.read_bytes())
    assert first.endswith(b"\x1a\x0dbrain.Event:2")
    assert len(others) == len(list(events.scalars(analyse(run))))


def test_figures_of_training_and_of_every_machine(run):
    found = list(events.scalars(analyse(run)))
    losses = [one for one in found if one.tag == "training/loss"]
    assert [one.step for one in losses] == list(range(10, 2001, 10))
    assert [one.value for one in losses] == pytest.approx([one.step / 1000 for one in losses])
    assert losses[-1].unix - losses[0].unix == pytest.approx(1990 * 0.138 + 2.5, abs=0.01)
    tags = {one.tag for one in found}
    for host in ("node1", "node4"):
        assert {f"Processors, busy, %/{host}", f"GPU, power, W/{host}"} <= tags
    top1 = [(one.step, one.value) for one in found if one.tag == "evaluation/top-1"]
    assert top1 == [(1000, pytest.approx(0.7)), (2000, pytest.approx(0.9))]


def test_a_run_without_a_step_has_none(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write_control()
    assert main(["tensorboard", str(tmp_path / "run")]) == 0
    (file,) = (tmp_path / "run/tensorboard").iterdir()
    assert len(list(records(file.read_bytes()))) == 1


def test_numbers_that_no_format_holds_and_files_of_an_earlier_attempt(run):
    assert events.event(1.0, 3, "loss", 1e39).endswith(struct.pack("<f", float("inf")))
    assert events.event(1.0, 3, "loss", -1e39).endswith(struct.pack("<f", float("-inf")))
    assert b"\x10" + b"\xfb" + b"\xff" * 8 + b"\x01" in events.event(1.0, -5, "loss", 1.0)
    folder = run / events.FOLDER
    folder.mkdir()
    (folder / "events.out.tfevents.1.tandem").write_bytes(b"of an attempt that was given up")
    (folder / "events.of.mine").write_bytes(b"")
    events.write_events(analyse(run))
    assert len(list(folder.glob("events.out.*"))) == 1 and (folder / "events.of.mine").exists()
