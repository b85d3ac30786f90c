"""What cannot work ends at once, on all ranks, with a sentence; what ends has its exit code."""

import contextlib
import gc
import os
import shutil
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from contract.errors import UserError
from contract.options import Options
from tandem.coordinates import ProcessCoordinates
from tests.trainer_ranks import lines, make_images, run_ranks, said, trainer
from trainer import world
from trainer.memory import OutOfMemory, detect_out_of_memory, is_out_of_memory
from trainer.step import reserve_bytes

MODEL = ["--model", "tests.trainer_models:plain", "--workers", 0, "--epochs", 1]


def run(images, model, *more, nodes=(1,), function=trainer, **settings):
    argv = ["--data", images, *MODEL, "--model", f"tests.trainer_models:{model}"]
    return run_ranks(nodes, function, *argv, *more, **settings)


@pytest.mark.parametrize(
    "more, word",
    [
        (["--data", "/nowhere"], "/nowhere"),
        (["--per_node_batch_size", 1], "Use at least 2"),
        (["--skip_oom"], "--skip_oom"),
        (["--precision", "O1"], "use fp32"),
        (["--model", "tests.trainer_models:unused"], "--find_unused_parameters"),
        (["--resume", "/nowhere"], "/nowhere"),
        (["--parallel", "dp"], "use --parallel ddp"),
        (["--weights", "/nowhere.pt"], "/nowhere.pt"),
        (["--gpu0_batch", 3], "needs --gpu0_batch"),
        (["--predict", "x.csv"], "--weights"),
        (["--predict", "/nowhere/x.csv", "--weights", "x.pt"], "/nowhere/x.csv"),
        (["--predict", "x.csv", "--extract", "x.csv", "--weights", "x.pt"], "give each another"),
        (["--output", "/dev/null/run"], "cannot write /dev/null/run"),
    ],
)
def test_bad_input_ends_all_ranks_with_a_sentence(images, more, word):
    """Pitfall 21 among them: without find_unused_parameters it would hang at the second step."""
    for code, text in run_ranks([1, 1], said, "--data", images, *MODEL, *more):
        assert (code, text.count("\n")) == (2, 1), text
        assert word in text


def test_a_sentence_names_its_machine_where_others_have_none(images):
    """One of three nodes has no data there."""
    folders = [images, "/nowhere", images]
    for code, text in run_ranks([1, 1, 1], said_with_own_data, folders, *MODEL):
        assert code == 2
        assert text.startswith("trainer: node2: --data /nowhere")
        assert text.count("/nowhere") == text.count("\n") == 1


def test_a_class_that_has_another_name_on_one_machine_is_bad_input(images, tmp_path):
    shutil.copytree(images, tmp_path / "images")
    for split in ("train", "val"):
        (tmp_path / "images" / split / "class1").rename(tmp_path / "images" / split / "zebra")
    for code, text in run_ranks([1, 1], said_with_own_data, [images, tmp_path / "images"], *MODEL):
        assert code == 2 and "the ranks see different data sets" in text


def test_unused_parameters_train_when_asked_for(images):
    assert run(images, "unused", "--find_unused_parameters", nodes=(1, 1)) == [0, 0]


def test_a_missing_process_is_a_sentence_not_a_hang(images):
    """Pitfall 1: fewer processes than the world size."""
    env = {"WORLD_SIZE": 3}
    code, text = run_ranks([1], said, "--data", images, *MODEL, "--timeout", 1, env=env)[0]
    assert code == 2
    assert "Were 3 processes started" in text


def test_out_of_memory_has_its_own_code_and_a_smaller_micro_batch_goes_on(images, tmp_path):
    """Pitfall 17. The device holds 4 images: 8 do not fit, 2 x 4 do."""
    more = ["--output", tmp_path, "--per_node_batch_size", 8]
    assert run(images, "small_device", *more) == [76]
    smaller = {"TANDEM_MICRO_BATCH_DIVISOR": 2, "TANDEM_ATTEMPT": 2}
    assert run(images, "small_device", *more, env=smaller) == [0]


def test_evaluation_computes_on_no_more_images_at_once_than_training(images, tmp_path):
    """Training fitted and evaluation did not, which no smaller micro-batch cured."""
    more = ["--per_node_batch_size", 8, "--accumulate", 2]
    assert run(images, "small_device_always", *more, "--output", tmp_path) == [0]
    predict = ["--resume", tmp_path, "--predict", tmp_path / "out.csv"]
    assert run(images, "small_device_always", *more, *predict) == [0]


def test_trials_of_auto_batch_have_no_collectives(tmp_path):
    """One rank tries twice, the others once, and batch normalisation is over all of them."""
    images = make_images(tmp_path / "images", per_class=4)
    more = ["--per_node_batch_size", 8, "--auto_batch", "--sync_bn", "--timeout", 10]
    codes = run(images, "small_device_late", *more, "--output", tmp_path, nodes=(1, 2))
    assert codes == [0, 0, 0]
    assert [start["accumulate"] for (start,) in lines(tmp_path, "start")] == [2, 2, 2]


def test_a_trial_leaves_room_for_what_the_optimizer_makes_later(monkeypatch):
    weights = torch.nn.Parameter(torch.zeros(1000))
    card = SimpleNamespace(total_memory=100_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for settings, copies in (({}, 1), ({"momentum": 0.0}, 0), ({"optimizer": "adamw"}, 2)):
        job = SimpleNamespace(
            options=Options(**settings), world=SimpleNamespace(device=torch.device("cuda")),
            optimizer=torch.optim.SGD([weights], 0.1), sync=None,
        )  # fmt: skip
        assert reserve_bytes(job) == 5000 + copies * 4000


def alive(*argv):
    """Exit code, and at each pass that did not fit whether the last one's tensors were there; what
    is not free by itself is not found by the collector either."""
    from tests.trainer_models import Watched

    gc.disable()
    return trainer(*argv), Watched.alive


def test_a_step_that_is_skipped_leaves_nothing_in_memory(images):
    more = ["--per_node_batch_size", 8, "--skip_oom"]
    [(code, found)] = run(images, "watched", *more, function=alive)
    assert code == 0
    assert len(found) > 2 and not any(found)


@pytest.mark.parametrize(
    "words",
    [
        "Unable to find a valid cuDNN algorithm to run convolution",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ],
)
def test_what_libraries_say_on_a_full_device_is_out_of_memory(monkeypatch, words):
    free, stats = [4], {"num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 100))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)

    def failing(refused):
        with pytest.raises(RuntimeError) as raised, detect_out_of_memory():
            stats["num_ooms"] += refused
            raise RuntimeError(words)
        return raised.value

    assert isinstance(failing(0), OutOfMemory)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    free[0] = 40
    # What cuDNN asked for, beyond this process's own limit.
    assert isinstance(failing(1), OutOfMemory)
    # What was refused before, to --auto_batch's trials, is no reason now.
    error = failing(0)
    assert not isinstance(error, OutOfMemory) and not is_out_of_memory(error)


def test_what_a_pass_without_memory_held_is_free_at_once():
    """Not when the garbage collector runs: the next, smaller pass needs it."""
    held = []

    def fails():
        activations = torch.empty(1)
        held.append(weakref.ref(activations))
        raise RuntimeError("out of memory")

    def trial():
        with contextlib.suppress(OutOfMemory), detect_out_of_memory():
            fails()

    gc.disable()
    try:
        trial()
        assert held[0]() is None
    finally:
        gc.enable()


def test_the_device_is_set_before_the_group_is_formed(monkeypatch):
    """Pitfall 3: NCCL calls a model on another device than the local rank's "invalid usage"."""
    order = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: order.append(str(device)))
    monkeypatch.setattr(
        world, "_meet", lambda *_: order.append("meet") or world.Meeting(None, None, ())
    )
    monkeypatch.setattr(world, "describe_device", lambda *_: None)
    monkeypatch.setattr(world.World, "gather", lambda self, thing: [thing] * 8)
    for name, value in {"RANK": 6, "WORLD_SIZE": 8, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    world.start(Options())
    assert order == ["cuda:2", "meet"]


@pytest.mark.parametrize("backend, cards", [("nccl", ["eno1", "=eno1"]), ("gloo", ["eno1", None])])
def test_a_start_without_the_launcher_takes_the_card_towards_the_master(
    monkeypatch, backend, cards
):
    """NCCL would take any other, such as docker0."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in (*names, "NCCL_DEBUG", "NCCL_ASYNC_ERROR_HANDLING", "MASTER_PORT"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setattr(world, "interface_towards", lambda address: "eno1")
    monkeypatch.setattr(world, "_backend", lambda device: backend)

    alone = OSError("nobody is there")
    monkeypatch.setattr(world, "rendezvous", mock.Mock(side_effect=alone))
    with pytest.raises(UserError, match="could not connect to the other ranks"):
        world._meet(Options(), ProcessCoordinates(size=2), None, torch.device("cpu"))
    assert [os.environ.get(name) for name in names] == cards


def said_with_own_data(folders, *argv):
    """As `said`, with a data folder for each rank; a lost peer instead of an exit code."""
    try:
        return said("--data", folders[int(os.environ["RANK"])], *argv)
    except RuntimeError as error:
        return "peer lost", str(error)


def test_what_one_rank_alone_has_met_is_said_by_it(images, tmp_path):
    """Rank 0 of the machine cannot say it: it only sees a connection break."""
    spoilt = make_images(tmp_path, per_class=5)
    for path in spoilt.glob("train/*/[1-4].png"):
        path.write_bytes(b"no image")
    more = ["--image_size", 16, "--bad_images", 1, "--per_node_batch_size", 8]
    first, second = run_ranks([2], said_with_own_data, [images, spoilt], *MODEL, *more)
    assert first[0] == "peer lost"
    code, text = second
    assert code == 2
    assert "2 images cannot be used" in text
    assert text.count("trainer: ") == 1
