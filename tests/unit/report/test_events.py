"""What TensorBoard is given: records that its own reader takes, from what all machines recorded."""

import struct

import pytest

from report import events
from report.__main__ import main
from report.analysis import analyse
from tests.unit.report.report_runs import RunBuilder, change_lines


def records(data):
    """Each record of a file, its checksums compared."""
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        assert data[8:12] == events.mask_crc(data[:8])
        yield data[12 : 12 + size]
        assert data[12 + size : 16 + size] == events.mask_crc(data[12 : 12 + size])
        data = data[16 + size :]


@pytest.fixture
def run(tmp_path):
    folder = RunBuilder(tmp_path / "run", steps=400, gpu=True).write()
    for path in folder.glob("nodes/*/rank*.steps.jsonl"):
        change_lines(
            path, lambda line: {**line, "loss": line["step"] / 1000} if tenth(line) else line
        )
    return folder


def tenth(line):
    return line["kind"] == "step" and line["step"] % 10 == 0


def test_checksums_and_numbers_are_those_of_the_formats():
    assert events.crc32c(b"123456789") == 0xE3069283  # RFC 3720
    assert events.crc32c(bytes(32)) == 0x8A9136AA
    numbers = {0: b"\0", 127: b"\x7f", 128: b"\x80\x01", 300: b"\xac\x02"}
    assert {value: events.varint(value) for value in numbers} == numbers
    assert events.event(1.0, 3, "loss", 1e39).endswith(struct.pack("<f", float("inf")))
    assert events.event(1.0, 3, "loss", -1e39).endswith(struct.pack("<f", float("-inf")))
    assert b"\x10" + b"\xfb" + b"\xff" * 8 + b"\x01" in events.event(1.0, -5, "loss", 1.0)


def test_a_run_is_a_file_of_events(run, capsys):
    """In the place of those of an attempt that was given up."""
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events.out.tfevents.1.tandem").write_bytes(b"of an earlier one")
    (run / "tensorboard/events.of.mine").touch()
    for _ in range(2):
        assert main(["tensorboard", str(run)]) == 0
        assert capsys.readouterr().out.strip() == str(run / "tensorboard")
    file, mine = sorted((run / "tensorboard").iterdir(), reverse=True)
    assert mine.name == "events.of.mine"
    first, *others = records(file.read_bytes())
    assert first.endswith(b"\x1a\x0dbrain.Event:2")
    assert len(others) == len(list(events.scalars(analyse(run))))


def test_figures_of_training_and_of_every_machine(run):
    found = list(events.scalars(analyse(run)))
    losses = [one for one in found if one.tag == "training/loss"]
    assert [one.step for one in losses] == list(range(10, 401, 10))
    assert [one.value for one in losses] == pytest.approx([one.step / 1000 for one in losses])
    assert losses[-1].unix - losses[0].unix == pytest.approx(390 * 0.138 + 2.5, abs=0.01)
    tags = {one.tag for one in found}
    for host in ("node1", "node4"):
        assert {f"Processors, busy, %/{host}", f"GPU, power, W/{host}"} <= tags
    top1 = [(one.step, one.value) for one in found if one.tag == "evaluation/top-1"]
    assert top1 == [(200, pytest.approx(0.7)), (400, pytest.approx(0.9))]


def test_a_run_without_a_step_has_none(tmp_path):
    builder = RunBuilder(tmp_path / "run")
    builder.write_control()
    assert main(["tensorboard", str(tmp_path / "run")]) == 0
    (file,) = (tmp_path / "run/tensorboard").iterdir()
    assert len(list(records(file.read_bytes()))) == 1
