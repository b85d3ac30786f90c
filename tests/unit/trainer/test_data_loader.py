"""The ranks' batches: an exact division, and the same pixels whoever makes them."""

import dataclasses
import io
import pickle
import shutil
from random import Random
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from contract.errors import UserError
from contract.options import Options
from trainer.data.augment import (
    BILINEAR,
    GREY,
    RESIZES_BYTES,
    Evaluate,
    erase,
    random_box,
    random_crop,
    reduction,
)
from trainer.data.batch import Normalise
from trainer.data.decode import BadImage, Picture, open_picture, picture_of
from trainer.data.folder import CACHE_BYTES_MAX, ImageFolder, Sizes, fits_into_memory
from trainer.data.loader import TrainBatches, eval_batches
from trainer.world import World

CLASSES, EACH = 3, 9  # of train; val has one image less of each


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split, each in (("train", EACH), ("val", EACH - 1)):
        for name in range(CLASSES):
            (root / split / str(name)).mkdir(parents=True)
            for number in range(each):
                pixels = rng.integers(0, 255, (20, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / str(name) / f"{number}.png")
    return root


def world(rank=0, batches=(4,)):
    return World(rank=rank, size=len(batches), local_size=len(batches), batches=batches)


def samples(root, options, batches, epoch=0, start=0):
    """{index: (pixels, target)} of all ranks; fails when an index comes twice."""
    found = {}
    for rank in range(len(batches)):
        folder = ImageFolder(root, "train", options)
        for batch in TrainBatches(folder, options, world(rank, batches)).epoch(epoch, start):
            assert batch.images.dtype == torch.uint8
            assert batch.images.shape == (len(batch.indices), 3, 16, 16)
            for image, target, index in zip(batch.images, batch.targets, batch.indices.tolist()):
                assert index not in found
                found[index] = (image, int(target))
    return found


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[index][0], theirs[index][0]) and ours[index][1] == theirs[index][1]
        for index in ours
    )


@pytest.mark.parametrize("augment", ["none", "shift", "trivial"])
def test_pixels_depend_on_seed_epoch_and_index_alone(root, augment):
    options = Options(augment=augment, random_erase=0.5, workers=0)
    state = torch.get_rng_state()
    alone = samples(root, options, (4,))
    assert sorted(alone) == list(range(CLASSES * EACH))
    assert same(alone, samples(root, options, (3, 2, 5)))
    assert torch.equal(torch.get_rng_state(), state)
    assert not same(alone, samples(root, options, (4,), epoch=1))
    assert not same(alone, samples(root, dataclasses.replace(options, seed=1), (4,)))


def copies(root, options, batches):
    """[{rank: [(index, pixels)]}] of each step of an epoch."""
    steps = []
    for rank in range(len(batches)):
        loader = TrainBatches(ImageFolder(root, "train", options), options, world(rank, batches))
        for number, batch in enumerate(loader.epoch(0)):
            pairs = zip(batch.indices.tolist(), (image.numpy().tobytes() for image in batch.images))
            steps += [{}] * (number == len(steps))
            steps[number] = {**steps[number], rank: [*pairs]}
    return steps


@pytest.mark.parametrize("augment", ["shift", "crop"])  # kept in memory, and decoded each time
def test_copies_of_an_image_are_augmented_anew_and_on_other_ranks(root, augment):
    options = Options(augment=augment, random_erase=1.0, workers=0, repeat_augment=4)
    steps = copies(root, options, (4, 4, 4, 4))
    for rank in (rank for step in steps for rank in step.values()):
        assert len({index for index, _ in rank}) == len(rank)
    pairs = sorted(pair for step in steps for rank in step.values() for pair in rank)
    assert len(pairs) == len({*pairs}) == CLASSES * EACH
    assert len({index for index, _ in pairs}) == 7
    others = copies(root, options, (3, 2, 5))
    assert sorted(pair for step in others for rank in step.values() for pair in rank) == pairs


def test_each_sample_has_chances_of_its_own(root):
    """Pitfall 20 within a rank: 27 times the same file gives 27 crops."""
    options = Options(workers=0, augment="crop")
    folder = ImageFolder(root, "train", options)
    folder.paths = [folder.paths[0]] * len(folder)
    batches = TrainBatches(folder, options, world()).epoch(0)
    images = {image.numpy().tobytes() for batch in batches for image in batch.images}
    assert len(images) == CLASSES * EACH


def test_every_rank_sees_each_step_even_without_samples(root):
    options = Options(workers=0)
    folder = ImageFolder(root, "train", options)
    per_rank = [
        list(TrainBatches(folder, options, world(rank, (4, 4, 4))).epoch(0, CLASSES * EACH - 5))
        for rank in range(3)
    ]
    assert [batch.global_count for batch in per_rank[2]] == [5]
    assert [len(batches[0].indices) for batches in per_rank] == [3, 2, 0]
    assert per_rank[2][0].images.shape == (0, 3, 16, 16)


@pytest.mark.parametrize("ranks", [1, 5, 30])
def test_evaluation_counts_each_image_once(root, ranks):
    options = Options(workers=0)
    folder = ImageFolder(root, "val", options)
    indices = [
        index
        for rank in range(ranks)
        for batch in eval_batches(folder, options, world(rank, (3,) * ranks), 3)
        for index in batch.indices.tolist()
    ]
    assert sorted(indices) == list(range(len(folder)))


@pytest.fixture
def spoilt(root, tmp_path):
    """Two bad images in train, one in val."""
    shutil.copytree(root, tmp_path / "spoilt")
    for bad in ("train/0/1.png", "train/2/5.png", "val/1/0.png"):
        (tmp_path / "spoilt" / bad).write_bytes(b"")
    return tmp_path / "spoilt"


def test_bad_images_are_replaced_alike_on_any_rank(spoilt, root):
    """By one of its class."""
    options = Options(workers=0, augment="none")
    targets = ImageFolder(spoilt, "train", options).targets
    alone = samples(spoilt, options, (4,))
    assert sorted(alone) == list(range(CLASSES * EACH))
    assert same(alone, samples(spoilt, options, (3, 2, 5)))
    clean = {image.numpy().tobytes(): t for image, t in samples(root, options, (4,)).values()}
    for index, (image, target) in alone.items():
        assert clean[image.numpy().tobytes()] == target == targets[index]
    folder = ImageFolder(spoilt, "train", options)
    list(TrainBatches(folder, options, world()).epoch(0))
    assert sorted(folder.quarantine.images) == ["train/0/1.png", "train/2/5.png"]


def test_where_a_whole_class_is_bad_others_take_its_place(spoilt):
    for path in (spoilt / "train/0").iterdir():
        path.write_bytes(b"")
    drawn = samples(spoilt, Options(workers=0, augment="none", image_size=16), (4,))
    assert sorted(drawn) == list(range(CLASSES * EACH))
    assert 0 not in {target for _, target in drawn.values()}


def test_bad_images_are_left_out_of_evaluation(spoilt):
    options = Options(workers=0)
    folder = ImageFolder(spoilt, "val", options)
    batches = list(eval_batches(folder, options, world(), 4))
    lost = folder.paths.index("val/1/0.png")
    indices = [index for batch in batches for index in batch.indices.tolist()]
    assert indices == [index for index in range(len(folder)) if index != lost]
    for batch in batches:
        assert len(batch.images) == len(batch.targets) == batch.global_count
        assert batch.targets.tolist() == [folder.targets[index] for index in batch.indices]
    assert len(folder.quarantine) == 1


def test_too_many_bad_images_stop_the_run(spoilt):
    options = Options(workers=0, bad_images=1, image_size=16)
    with pytest.raises(UserError, match="2 images cannot be used"):
        list(TrainBatches(ImageFolder(spoilt, "train", options), options, world()).epoch(0))
    for path in spoilt.rglob("*.png"):
        path.write_bytes(b"")
    options = Options(workers=0, image_size=16)
    with pytest.raises(UserError, match="drawn one after another cannot be used"):
        list(TrainBatches(ImageFolder(spoilt, "train", options), options, world()).epoch(0))


@pytest.mark.parametrize("least, most, aspect", [(0.08, 1.0, 4 / 3), (0.02, 0.33, 1 / 0.3)])
def test_boxes_stay_inside_and_cover_the_stated_range(least, most, aspect):
    rng, shares, ratios = Random(0), [], []
    for _ in range(3000):
        left, top, right, bottom = random_box((500, 400), rng, least, most, aspect)
        assert 0 <= left < right <= 500 and 0 <= top < bottom <= 400
        shares.append((right - left) * (bottom - top) / 200_000)
        ratios.append((right - left) / (bottom - top))
    assert least - 0.002 < min(shares) < least * 1.2 and most * 0.95 < max(shares) < most + 0.002
    assert 1 / aspect * 0.97 < min(ratios) < 1 / aspect * 1.1
    assert aspect / 1.1 < max(ratios) < aspect * 1.03


def test_a_crop_of_a_very_long_image_is_its_middle():
    pixels = np.zeros((4, 400, 3), dtype=np.uint8)
    pixels[:, 198:202] = 200
    assert random_box((400, 4), Random(0), 0.5, 1.0, 4 / 3) is None
    unfit = mock.Mock(random=lambda: 1 - 2**-53)  # draws nothing that fits
    crop = random_crop(Picture(Image.fromarray(pixels)), 8, unfit)
    assert crop.shape == (8, 8, 3)
    assert (crop[:, 1:-1] == 200).all()


def test_erasing_paints_a_rectangle_of_the_mean_colour():
    shares = []
    for seed in range(50):
        pixels = np.zeros((64, 64, 3), dtype=np.uint8)
        erase(pixels, Random(seed))
        painted = (pixels == GREY).all(2)
        rows, columns = np.nonzero(painted)
        assert painted[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
        assert not pixels[~painted].any()
        shares.append(painted.mean())
    assert 0.01 < min(shares) < 0.1 and 0.25 < max(shares) < 0.35


def test_normalise_is_torchvisions_and_rounds_half_images_once():
    from torchvision.transforms.functional import normalize

    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    double, half, single = (
        Normalise(torch.device("cpu"), dtype, torch.channels_last)(images)
        for dtype in (torch.float64, torch.float16, torch.float32)
    )
    theirs = normalize(images.double() / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    torch.testing.assert_close(double, theirs, rtol=0, atol=1e-12)
    assert double.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(half, single.half())


@pytest.mark.parametrize("size", [(1, 5000), (40, 30)])
def test_evaluation_scales_no_image_to_gigabytes(monkeypatch, size):
    """One pixel by 5,000, its short side scaled to 256, would be 256 by 1.28 million."""
    made, resize = [], Image.Image.resize

    def measured(image, to, *more):
        made.append(to[0] * to[1])
        return resize(image, to if made[-1] < 1e7 else (256, 256), *more)

    monkeypatch.setattr(Image.Image, "resize", measured)
    picture = Picture(Image.new("RGB", size, (9, 9, 9)))
    pixels = Evaluate(Sizes(224, 224, 256))(picture, Random(0))
    assert pixels.shape == (224, 224, 3)
    assert (pixels == 9).all()
    assert max(made) < 3e6


# Small images are kept in memory


@pytest.mark.parametrize("augment, workers", [("none", 0), ("shift", 1)])
def test_kept_images_have_the_pixels_of_decoded_ones(spoilt, monkeypatch, augment, workers):
    """In the epoch that decodes them, in the next one, on any rank and beside bad images."""
    options = Options(random_erase=0.5, workers=workers, augment=augment)
    ours = [samples(spoilt, dataclasses.replace(options, workers=0), (3, 2, 5), 0)]
    folder = ImageFolder(spoilt, "train", options)
    for _ in range(2):
        again = [list(TrainBatches(folder, options, world()).epoch(epoch)) for epoch in range(2)]
    monkeypatch.setattr("trainer.data.folder.CACHE_BYTES_MAX", 0)
    options = dataclasses.replace(options, workers=0)
    theirs = [samples(spoilt, options, (4,), epoch) for epoch in range(2)]
    assert all(same(*pair) for pair in zip(ours, theirs))
    for batches, wanted in zip(again, theirs):
        found = [
            (int(index), (image, int(target)))
            for batch in batches
            for index, image, target in zip(batch.indices, batch.images, batch.targets)
        ]
        assert same(dict(found), wanted)


def test_what_is_kept_is_not_sent_to_loader_processes_and_has_a_bound(root, monkeypatch):
    options = Options(workers=0)
    folder = ImageFolder(root, "train", options)
    list(TrainBatches(folder, options, world()).epoch(0))
    assert folder.cache is not None
    assert pickle.loads(pickle.dumps(folder)).cache is None
    side = folder.cache.pixels.shape[1]
    most = CACHE_BYTES_MAX // (3 * side**2)
    monkeypatch.setattr("os.sysconf", lambda name: 2**20)  # memory without end
    assert fits_into_memory(most // 4, side, 4) and not fits_into_memory(most // 4 + 1, side, 4)
    monkeypatch.setattr("os.sysconf", lambda name: 2**10)  # 1 MiB
    assert not fits_into_memory(2**17 // (3 * side**2) + 1, side, 1)


# JPEGs are decoded to no more pixels than a crop needs


def photograph(size, seed):
    """Stand-in for a photograph as JPEG: smooth, with edges."""
    width, height = size
    draw = np.random.default_rng(seed)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    waves = [np.sin(x / a + b) * np.cos(y / b + a) for a, b in draw.uniform(9, 30, (3, 2))]
    image = np.stack([60 * wave + 120 for wave in waves], 2)
    for left, top in draw.integers(0, min(size), (6, 2)):
        image[top : top + 90, left : left + 120] += 120 * draw.random(3) - 60
    file = io.BytesIO()
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def test_scaled_decoding_keeps_the_crop_and_nearly_its_pixels():
    content, reduced = photograph((401, 303), 0), 0
    for seed in range(12):
        whole, scaled = (
            np.asarray(
                random_crop(Picture(Image.open(io.BytesIO(content))), 48, Random(seed), on),
                dtype=int,
            )
            for on in (False, True)
        )
        reduced += not np.array_equal(whole, scaled)
        apart = np.abs(whole - scaled)
        assert apart.mean() < 2
        assert np.percentile(apart, 99) <= 8
        # Moved by a single pixel, the crop would be ten times as far from itself.
        assert apart.mean() < 0.15 * np.abs(whole[1:] - whole[:-1]).mean()
    assert reduced >= 6


def odd_jpegs():
    """Photographs in the kinds of JPEGs that data sets have; the last three are damaged."""
    whole = Image.open(io.BytesIO(photograph((331, 243), 2)))
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = {
        "no subsampling": {"subsampling": "4:4:4"},
        "half the colours": {"subsampling": "4:2:2"},
        "progressive": {"progressive": True},
        "turned": {"exif": exif},
        "grey": {},
        "CMYK": {},
        "two pictures": {"format": "MPO", "save_all": True, "append_images": [whole]},
    }
    modes = {"grey": "L", "CMYK": "CMYK"}
    for kind, settings in kinds.items():
        file = io.BytesIO()
        whole.convert(modes.get(kind, "RGB")).save(file, **{"format": "JPEG", **settings})
        yield kind, file.getvalue()
    plain = photograph((331, 243), 3)
    yield "something behind it", plain + bytes(999)
    yield "cut", plain[: len(plain) // 2]
    yield "a byte lost", plain[: len(plain) // 2] + plain[len(plain) // 2 + 1 :]
    yield "zeros", plain[: len(plain) // 2] + bytes(len(plain) // 2)


def test_pixels_are_equal_with_and_without_the_fast_decoder(monkeypatch):
    simplejpeg = pytest.importorskip("simplejpeg")  # which CUDA 10.2's stack lacks
    used, refused = [], []

    def crop(content, module):
        monkeypatch.setattr("trainer.data.decode.simplejpeg", module)
        try:
            return random_crop(picture_of(content), 128, Random(5))
        except BadImage as error:
            refused.append(content)
            return str(error)

    def counted(*args):
        pixels = simplejpeg.decode_jpeg(*args)
        used.append(pixels.shape)
        return pixels

    for kind, content in odd_jpegs():
        fast = crop(content, mock.Mock(decode_jpeg=counted))
        assert np.array_equal(fast, crop(content, None)), kind
    assert len(used) >= 5 and len(set(refused)) == 2


@pytest.mark.skipif(not RESIZES_BYTES, reason="torch 1.12 scales no bytes")
def test_torch_scales_a_crop_nearly_as_pillow_does(monkeypatch):
    content = photograph((401, 303), 4)
    for seed in range(6):
        crops = []
        for bytes_too in (True, False):  # False: of torch 1.12
            monkeypatch.setattr("trainer.data.augment.RESIZES_BYTES", bytes_too)
            crops.append(random_crop(picture_of(content), 96, Random(seed)).astype(int))
        assert np.abs(crops[0] - crops[1]).mean() < 0.2


@pytest.mark.parametrize("side, factor", [(143, 1), (575, 2), (576, 4), (1152, 8)])
def test_a_crop_keeps_half_again_as_many_pixels_as_it_gets(side, factor):
    assert reduction((8, 4, 2, 1), (3, 5, 3 + side, 5 + side + 40), 96) == factor


@pytest.mark.parametrize(
    ("size", "orientation"),
    [*(((160, 96), n) for n in range(1, 9)), ((161, 97), 1), ((161, 97), 6)],
)
def test_scaled_pixels_stand_where_the_whole_ones_do(tmp_path, size, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.open(io.BytesIO(photograph(size, 1)))
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    whole, scaled = open_picture(tmp_path / "a.jpg"), open_picture(tmp_path / "a.jpg")
    factor = scaled.factors[0]
    assert factor == (1 if orientation > 1 and size == (161, 97) else 8)
    theirs, ours = whole.pixels(), scaled.pixels(factor)
    assert theirs.size == scaled.size
    assert ours.size == tuple(-(-side // factor) for side in theirs.size)
    box = (16, 8, 80, 72)
    region = tuple(edge / factor for edge in box)
    apart = np.asarray(ours.resize((8, 8), BILINEAR, region), dtype=int) - theirs.resize(
        (8, 8), BILINEAR, box
    )
    assert np.abs(apart).mean() < 12


def test_only_training_crops_are_scaled_and_only_where_they_are_meant_to_be(tmp_path, monkeypatch):
    factors, pixels, region = [], Picture.pixels, Picture.region
    monkeypatch.setattr(
        Picture, "pixels", lambda picture, factor=1: factors.append(factor) or pixels(picture)
    )
    monkeypatch.setattr(
        Picture, "region", lambda picture, box: factors.append(1) or region(picture, box)
    )
    for number, name in enumerate(("train/a", "train/b", "val/a", "val/b")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "0.jpg").write_bytes(photograph((400, 300), number))
    for on in (None, False, True):
        factors.clear()
        options = Options(workers=0, image_size=48, jpeg_scaling=on)
        folder = ImageFolder(tmp_path, "train", options)
        list(TrainBatches(folder, dataclasses.replace(options, augment="crop"), world()).epoch(0))
        assert len(factors) == 2
        assert (max(factors) > 1) is bool(on)
    factors.clear()
    list(eval_batches(ImageFolder(tmp_path, "val", options), options, world(), 4))
    assert factors == [1, 1]
