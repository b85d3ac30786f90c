"""Starting from somebody's weights: the files that people have, a head for other classes, and what
stays frozen; a resumed run is equal to the bit."""

import json
import struct

import pytest
import torch
import torchvision
from torch import nn

from contract.errors import UserError
from contract.options import Options
from tests.trainer_models import normed
from tests.trainer_ranks import (
    as_safetensors,
    most_memory,
    newest_checkpoint,
    run_ranks,
    said,
    trainer,
)
from trainer.freeze import freeze
from trainer.models import WithHead, find_head
from trainer.optim import build_optimizer
from trainer.weights import fit_tensors, read_weights

PER_CLASS = 8
MODEL = ["--model", "tests.trainer_models:normed", "--workers", 0, "--per_node_batch_size", 4]
RESNET = torchvision.models.resnet18


def prefixed(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


FILES = {
    "torchvision": lambda t: t,
    "torchvision before 0.2, without counters": lambda t: {
        name: one for name, one in t.items() if "num_batches" not in name
    },
    "timm's training": lambda t: {"arch": "x", "state_dict": t, "state_dict_ema": {}, "epoch": 3},
    "compiled, then DDP": lambda t: {"model": prefixed("module._orig_mod.", t)},
    "Lightning": lambda t: {"state_dict": {**prefixed("model.", t), "loss.weight": t["fc.bias"]}},
    "an average alone": lambda t: {"model_ema": prefixed("module.", t)},
    "half": lambda t: {n: one.half() if one.is_floating_point() else one for n, one in t.items()},
}


@pytest.fixture(scope="module")
def thousand():
    torch.manual_seed(1)
    return {name: one.clone() for name, one in RESNET(weights=None).state_dict().items()}


@pytest.mark.parametrize("kind", [*FILES, "safetensors"])
def test_the_files_that_people_have_start_a_model_of_ten_classes(thousand, tmp_path, kind):
    path = tmp_path / "weights"
    if kind == "safetensors":
        path.write_bytes(as_safetensors(thousand))
    else:
        torch.save(FILES[kind](thousand), path)
    model = RESNET(weights=None, num_classes=10)
    fit = fit_tensors(model, read_weights(str(path)).tensors, 10)
    assert sorted(fit.missing) == ["fc.bias", "fc.weight"] and fit.backbone_share == 1
    same = [
        torch.allclose(fit.tensors[n].float(), thousand[n].float(), atol=1e-3) for n in fit.tensors
    ]
    if "counters" not in kind:
        assert all(same) and len(same) == len(thousand) - 2


PAIRS = {
    "MoCo": lambda one, two: {
        "state_dict": {**prefixed("module.encoder_q.", one), **prefixed("module.encoder_k.", two)}
    },
    "DINO": lambda one, two: {
        "student": prefixed("module.backbone.", one), "teacher": prefixed("backbone.", two)
    },
    "an ensemble": lambda one, two: {**prefixed("models.0.", one), **prefixed("models.1.", two)},
    "Lightning": lambda one, two: {
        "state_dict": {**prefixed("model.", one), **prefixed("ema_model.", two)}
    },
    "timm": lambda one, two: {"state_dict": one, "state_dict_ema": two},
    "ours": lambda one, two: {"model": one, "ema": {"updates": 3, "average": two}},
}  # fmt: skip
AVERAGED = {"Lightning": "state_dict.model.", "timm": "state_dict.", "ours": "model."}
PREFIXES = {"MoCo": ("encoder_q", "module.encoder_k."), "DINO": ("student.module.backbone",
    "teacher.backbone."), "an ensemble": ("models.0", "1"), "ours": ("model", "ema.average"),
    "Lightning": ("model.", "ema_model"), "timm": ("state_dict", "state_dict_ema")}  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
def test_of_two_networks_in_a_file_the_trained_one_or_the_named_one_is_taken(
    thousand, tmp_path, kind
):
    path, model = tmp_path / "weights", RESNET(weights=None, num_classes=10)
    zeros = {name: torch.zeros_like(one) for name, one in thousand.items()}
    torch.save(PAIRS[kind](thousand, zeros), path)
    tensors = read_weights(str(path)).tensors
    fit = fit_tensors(model, tensors, 10)
    if kind in AVERAGED:
        assert fit.tensors["conv1.weight"].any() and fit.prefixes[0] == AVERAGED[kind]
        assert fit.prefixes[1] in fit.accept("x", "y")[0]
    else:
        with pytest.raises(UserError) as refused:
            fit.accept("x", "y")
        assert all(prefix in str(refused.value) for prefix in fit.prefixes)
    for number, prefix in enumerate(PREFIXES[kind]):
        named = fit_tensors(model, tensors, 10, prefix)
        assert named.tensors["conv1.weight"].any() == (number == 0)
        assert named.prefixes[0] in named.accept("x", "y")[0]
    with pytest.raises(UserError, match="--weights_prefix nothing: "):
        fit_tensors(model, tensors, 10, "nothing")


def test_a_backbone_of_one_s_own_takes_the_net_s_weights(thousand):
    """Its tensors have a prefix that the file's have not."""
    backbone = RESNET(weights=None)
    backbone.fc = nn.Identity()
    fit = fit_tensors(WithHead(backbone, 512, 10), thousand, 10)
    assert sorted(fit.missing) == ["fc.bias", "fc.weight"] and fit.backbone_share == 1


def test_a_transformer_s_positions_are_resized():
    """From 32 to 64 pixels, 4 patches to 16 behind the token of the class: each corner of the new
    grid is near that of the old one."""
    make = lambda side: torchvision.models.VisionTransformer(side, 16, 1, 2, 8, 8, num_classes=3)  # noqa: E731
    theirs, ours = make(32).state_dict(), make(64)
    value = fit_tensors(ours, theirs, 3).tensors["encoder.pos_embedding"]
    old = theirs["encoder.pos_embedding"]
    assert value.shape == (1, 17, 8) and torch.equal(value[:, 0], old[:, 0])
    assert torch.cdist(value[:, 1], old[0, 1:]).argmin() == 0
    assert torch.cdist(value[:, 16], old[0, 1:]).argmin() == 3


@pytest.mark.skipif(not hasattr(torch.device, "__enter__"), reason="torch 1.12 has no context")
@pytest.mark.parametrize(
    "name, names",
    [
        ("resnet18", ["fc.weight", "fc.bias"]),
        ("vit_b_32", ["heads.head.weight", "heads.head.bias"]),
    ],
)
def test_the_head_is_what_has_an_output_for_each_class(name, names):
    with torch.device("meta"):
        model = getattr(torchvision.models, name)(weights=None, num_classes=10)
    assert find_head(model, 10) == names and find_head(model, 11) == []


DAMAGED = {
    "cut in its header": lambda raw: raw[:20],
    "cut in a tensor": lambda raw: raw[:-1],
    "a type of another world": lambda raw: raw.replace(b'"F32"', b'"F99"'),
    "negative": lambda raw: raw.replace(b'"shape": [', b'"shape": [-', 1),
    "no number": lambda raw: raw.replace(b"[0, 24]", b"[NaN, 0]"),
    "something behind it": lambda raw: raw + b"x",
    "something between": lambda _: header({"a": (8, 0, 8), "b": (8, 16, 24)}, 24),
    "bytes of two": lambda _: header({"a": (8, 0, 8), "b": (8, 4, 12)}, 12),
    "each tensor the whole file": lambda _: header({str(n): (900, 0, 900) for n in range(40)}, 900),
}


def header(places, length):
    entries = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [first, last]}
        for name, (size, first, last) in places.items()
    }
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(length)


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_safetensors_are_refused(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    path.write_bytes(DAMAGED[kind](as_safetensors({"weight": torch.ones(3, 2)})))
    with pytest.raises(UserError, match=r"x\.safetensors"):
        read_weights(str(path))


def refusal_memory(path):
    """In a process of its own: the MiB that it took to refuse a file."""
    before = most_memory()
    with pytest.raises(UserError):
        read_weights(str(path))
    return most_memory() - before


def test_a_damaged_safetensors_file_takes_no_memory(tmp_path):
    """Many tensors of the same bytes, and one whose length makes their sum right."""
    path, size = tmp_path / "x.safetensors", 4 << 20
    whole = {str(n): (size, 0, size) for n in range(100)}
    path.write_bytes(header({**whole, "less": (0, 99 * size, 0)}, size))
    assert run_ranks([1], refusal_memory, path)[0] < 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a net for 1000 classes, which is another one than that of seed 0."""
    path = tmp_path_factory.mktemp("weights") / "thousand.pt"
    torch.manual_seed(5)
    torch.save({"state_dict": prefixed("module.", normed(1000).state_dict())}, path)
    return path


# "backbone" with its batch normalisation, and one layer of it.
KINDS = {
    "all": [],
    "backbone": ["--freeze", "backbone"],
    "ef": ["--freeze", "0", "--sync", "ef:5", "--sync_warmup", 0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_them_and_a_resume_is_equal_to_the_bit(
    images, weights, tmp_path, kind
):
    """Two ranks, stopped in the middle of an epoch; what is frozen is as the file has it, with its
    running statistics, and the rest is not."""
    argv = ["--data", images, *MODEL, "--weights", weights, *KINDS[kind], "--ema", 0.5]
    argv += ["--output", tmp_path, "--checkpoint_every", 3, "--keep", 9, "--epochs", 2]
    assert run_ranks([1, 1], trainer, *argv) == [0, 0]
    ours = newest_checkpoint(tmp_path)
    every = {*tmp_path.glob("checkpoints/*/*.pt")}
    for file in every - {*tmp_path.glob("checkpoints/*/step-*3.pt")}:
        file.unlink()
    assert newest_checkpoint(tmp_path)["step"] == 3
    assert run_ranks([1, 1], trainer, *argv, "--resume", "auto") == [0, 0]
    theirs = newest_checkpoint(tmp_path)
    assert ours["step"] == theirs["step"] > 3
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"])
    first = {name[7:]: one for name, one in torch.load(weights)["state_dict"].items()}
    stayed = {n for n, one in ours["model"].items() if "8." not in n and torch.equal(one, first[n])}
    frozen = {
        "all": set(), "backbone": set(first) - {"8.weight", "8.bias"},
        "ef": {"0.weight"},
    }[kind]  # fmt: skip
    assert stayed == frozen


def test_another_net_s_weights_are_refused_on_all_ranks(images, weights, tmp_path):
    argv = ["--data", images, "--model", "tests.trainer_models:several", "--weights", weights]
    answers = run_ranks([1, 1], said, *argv, "--workers", 0, "--output", tmp_path)
    assert [code for code, _ in answers] == [2, 2]
    for _, text in answers:
        assert (
            f"--weights {weights}" in text and "another model" in text and "Traceback" not in text
        )
    assert not [*tmp_path.glob("checkpoints/*/*")]


@pytest.mark.parametrize("pattern", ["backbone,nothing", "*"])
def test_freezing_nothing_or_everything_is_refused(images, pattern):
    argv = ["--data", images, *MODEL, "--freeze", pattern]
    answers = run_ranks([1, 1], said, *argv)
    assert [code for code, _ in answers] == [2, 2]
    assert all(f"trainer: --freeze {pattern}" in text for _, text in answers)


def test_what_is_frozen_stays_in_evaluation_and_without_gradients():
    """Also a dropout within it; one before the head goes on."""
    model = torchvision.models.mobilenet_v2(weights=None, num_classes=10)
    freeze(model, "backbone", 10)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {*find_head(model, 10)}
    assert not any(module.training for module in model.features.modules())
    assert model.classifier[0].training


def test_the_head_s_learning_rate_is_a_factor():
    model = normed(4)
    made = build_optimizer(model, Options(lr=0.5, head_lr=10), 8, find_head(model, 4))
    factors = {id(p): g["lr_factor"] for g in made.param_groups for p in g["params"]}
    assert {n for n, p in model.named_parameters() if factors[id(p)] == 10} == {
        "8.weight",
        "8.bias",
    }
