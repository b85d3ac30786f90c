"""A disk or file server that fails is told from a bad image. The errors are the kernel's own:
reading /proc/self/mem at its beginning is EIO."""

import errno
import os
import shutil
from unittest import mock

import pytest

from contract import layout
from contract.errors import DATA_LOST
from contract.options import Options
from tests.trainer_ranks import lines, make_images, newest_checkpoint, run_ranks, said
from trainer.data import decode, folder, loader
from trainer.data.augment import Evaluate
from trainer.data.decode import Missing, Unreadable, open_picture
from trainer.train import Run

ARGV = ["--model", "tests.trainer_models:plain", "--epochs", 2, "--image_size", 16]


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", per_class=4)


def fails(path):
    path.unlink()
    path.symlink_to("/proc/self/mem")


def quickly(*argv):
    """In a rank: the trainer, which does not wait between its trials."""
    decode.PAUSES = (0.0, 0.0)
    return said(*argv)


@pytest.mark.hypothesis
def test_a_read_error_that_passes_is_waited_for(images, monkeypatch):
    path = images / "train/class0/0.png"
    good = path.read_bytes()
    fails(path)
    waited = []

    def well_again(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            path.unlink()
            path.write_bytes(good)

    monkeypatch.setattr(decode, "sleep", well_again)
    assert open_picture(path).size == (16, 16)
    assert waited == [0.5, 1.0, 2.0]
    fails(path)
    with pytest.raises(Unreadable, match="Input/output error"):
        open_picture(path)
    assert sum(waited[3:]) == sum(decode.PAUSES) < 10
    path.unlink()
    with pytest.raises(Missing, match="No such file"):
        open_picture(path)
    assert len(waited) == 8  # nobody waits for a file that is not there


def bad_images(run):
    return lines(run)[0][-1]["bad_images"]


def test_one_bad_sector_is_a_bad_image(images, tmp_path):
    fails(images / "train/class0/0.png")
    argv = ["--data", images, *ARGV, "--workers", 1, "--output", tmp_path / "run"]
    [(code, text)] = run_ranks([1], quickly, *argv)
    assert code == 0, text
    assert bad_images(tmp_path / "run") == 1


def test_a_share_that_fails_ends_the_run_with_its_own_code_and_its_name(images):
    for path in images.glob("train/*/*.png"):
        fails(path)
    more = ["--workers", 1, "--augment", "crop"]
    [(code, text)] = run_ranks([1], quickly, "--data", images, *ARGV, *more)
    assert code == DATA_LOST == 78, text
    [sentence] = [line for line in text.splitlines() if line.startswith("trainer: ")]
    mount = folder.ImageFolder(str(images), "train", Options()).mount_of("train/x")
    assert sentence.startswith(f"trainer: {mount} stopped delivering ")
    assert "Input/output error" in sentence
    assert "Traceback" not in text


def test_a_disk_of_which_memory_has_a_part_ends_so_too(images):
    """Each failing image has a good one beside it, as the page cache has them."""
    for path in images.glob("train/*/[01].png"):
        fails(path)
    argv = ["--data", images, *ARGV, "--workers", 0, "--bad_images", 3, "--epochs", 4]
    [(code, text)] = run_ranks([1], quickly, *argv)
    assert code == DATA_LOST, text


@pytest.mark.parametrize("kept", [0, 1])
def test_a_share_that_fails_is_waited_for_once_and_not_by_each_file(images, monkeypatch, kept):
    """Seconds until it is named: it took as long as its first batch, 7.5 s an image. With one good
    image among them, as often as once in RETRY_AFTER."""
    for path in sorted(images.glob("train/*/*.png"))[kept:]:
        fails(path)
    waited = []
    monkeypatch.setattr(decode, "sleep", waited.append)
    options = Options(image_size=16)
    found = folder.ImageFolder(str(images), "train", options)
    monkeypatch.setattr(folder, "PROBE_COUNT", len(found))  # so that the good one is met
    samples = loader.Samples(found, Evaluate(found.sizes), 0)
    bad = [one for n in range(len(found)) for one in samples[loader.Draw(0, n)].bad]
    assert sum(waited) == sum(decode.PAUSES)
    assert {one.mount_works for one in bad} == {bool(kept)} and len({one.path for one in bad}) > 10
    monkeypatch.setattr(loader.time, "monotonic", lambda: 1e9)  # much later
    samples[loader.Draw(None, len(found) - 1)]
    samples.given_up.clear()
    samples[loader.Draw(None, len(found) - 1)]
    assert sum(waited) == (1 + kept) * sum(decode.PAUSES)


def test_a_mount_of_few_of_the_images_that_vanishes_is_none_of_bad_images(images, monkeypatch):
    """One class of forty has a disk of its own."""
    first = images / "train/class0"
    for number in range(4, 40):
        (images / f"train/class{number}").mkdir()
        for name in ("0.png", "1.png"):
            shutil.copy(first / name, images / f"train/class{number}")
    disk = folder.Mount("/dev/sdb1", str(first), "ext4")
    monkeypatch.setattr(
        folder, "read_mounts", lambda: [disk, folder.Mount("/dev/sda1", "/", "ext4")]
    )
    found = folder.ImageFolder(str(images), "train", Options())
    assert found.can_read_neighbours("train/class0/0.png")
    for path in first.iterdir():
        path.unlink()
    assert not found.can_read_neighbours("train/class0/0.png")
    assert found.can_read_neighbours("train/class39/0.png")


def emptied(pattern, *argv):
    """In a rank: the trainer, whose files of this pattern go away when both splits are listed."""
    listed = folder.read_split

    def then_gone(root, split):
        found = listed(root, split)
        if split == "val":
            for path in [*root.glob(pattern)]:
                path.rename(path.with_name(f"{path.name}-gone"))
        return found

    folder.read_split = then_gone
    return quickly(*argv)


def test_a_mount_that_vanishes_ends_the_run_as_one_that_fails(images):
    """What was mounted on `images` is gone: the kernel's own ENOENT for each file."""
    [(code, text)] = run_ranks([1], emptied, "*", "--data", images, *ARGV, "--workers", 0)
    assert code == DATA_LOST, text
    [sentence] = [line for line in text.splitlines() if line.startswith("trainer: ")]
    assert "stopped delivering images: train/class" in sentence
    assert "bad image" not in text


def test_files_that_are_gone_by_themselves_are_bad_images(images, tmp_path):
    """They are named, and count for --bad_images, whose remedy is another."""
    argv = ["--data", images, *ARGV, "--workers", 0, "--output", tmp_path / "run"]
    [(code, text)] = run_ranks([1], emptied, "train/*/0.png", *argv)
    assert code == 0, text
    assert bad_images(tmp_path / "run") == 4
    for path in [*images.glob("train/*/0.png-gone")]:
        path.rename(path.with_name("0.png"))
    [(code, text)] = run_ranks([1], emptied, "train/*/0.png", *argv, "--bad_images", 1)
    assert code == 2 and "Repair or remove them, or raise --bad_images" in text, text


def stale(*argv):
    """In a rank: the trainer, whose second node's share is stale."""
    if os.environ["RANK"] == "1":
        refused = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "x")
        layout.os.scandir = mock.Mock(side_effect=refused)
    return said(*argv)


def test_all_ranks_end_with_the_code_of_the_one_that_cannot_list_its_images(images):
    for code, text in run_ranks([1, 1], stale, "--data", images, *ARGV):
        assert code == DATA_LOST, text
        assert "node2: --data" in text and "Stale file handle" in text


def damage(path):
    path.write_bytes(b"no image")


def remove(path):
    path.unlink(missing_ok=True)


def spoilt_later(spoil, pattern, *argv):
    """In a rank: the trainer, whose images of val of this pattern are spoilt after its start."""
    find_position = Run._find_position

    def then_spoil(run):
        for path in run.job.eval_set.root.glob(f"val/{pattern}"):
            spoil(path)
        find_position(run)

    Run._find_position = then_spoil
    return said(*argv)


@pytest.mark.parametrize(("spoil", "ranks", "code"), [(damage, 2, 2), (remove, 1, DATA_LOST)])
def test_what_was_trained_is_saved_if_no_image_of_val_can_be_read(
    images, tmp_path, spoil, ranks, code
):
    output = tmp_path / "run"
    argv = ["--data", images, *ARGV, "--workers", 0, "--output", output]
    for ended, text in run_ranks([1] * ranks, spoilt_later, spoil, "*/*", *argv):
        assert ended == code, text
    assert newest_checkpoint(output)["epoch"] == 1
    assert not any(lines(output, "evaluate"))


def test_an_evaluation_of_some_of_the_images_says_of_how_many(images, tmp_path):
    argv = ["--data", images, *ARGV, "--workers", 0, "--output", tmp_path / "run"]
    run_ranks([1, 1], spoilt_later, damage, "*/[01].png", *argv)
    assert {line["samples"] for ranks in lines(tmp_path / "run", "evaluate") for line in ranks} == {
        4
    }
