"""tandem/ as scripts get it, sent along or by pip: beside a contract.py of their own."""

import contextlib
import io
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tandem import __version__, standalone
from tests.trainer_ranks import run_ranks

ROOT = Path(__file__).parents[3]
OWN = '"""A script\'s own module of that name."""\nCLIENTS = ["somebody"]\n'
# As one rank of one, where the checkout is nowhere on the path.
SCRIPT = """
import contract, sys
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel
import tandem.sync, tandem.timings

assert contract.CLIENTS == ["somebody"]
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
ddp = DistributedDataParallel(Linear(2, 2))
tandem.sync.attach(ddp, "ef:3")
try:
    tandem.sync.attach(ddp.module, "ef:5")
except tandem.UserError as error:
    print(error)
ours = {name for name in sys.modules if name.split(".")[0] in ("contract", "trainer", "launcher")}
print(*sorted(ours), Path(tandem.__file__).parents[1])
""".replace("import contract, sys", "from pathlib import Path\nimport contract, sys")


def as_a_script(folder):
    """What the script prints in a process that has torch, but nothing of the checkout."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("contract", "launcher", "tandem", "tests", "trainer"):
            del sys.modules[name]
    sys.path[:] = [f"{folder}/sent", *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # as Python does
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def test_what_is_sent_along_needs_nothing_of_the_checkout(tmp_path):
    standalone.write(tmp_path / "sent")
    (tmp_path / "contract.py").write_text(OWN)
    (printed,) = run_ranks([1], as_a_script, tmp_path)
    said, modules = printed.splitlines()
    assert said.startswith(
        "tandem.sync.attach: this model is a Linear, not a DistributedDataParallel"
    )
    assert modules.split() == ["contract", str(tmp_path / "sent")]


def test_every_import_of_the_rules_is_of_the_copy():
    for name, text in standalone.files().items():
        for line in text.splitlines():
            assert not line.strip().startswith(("from contract", "import contract")), name


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="a node has no checkout")
def test_the_sdist_installs_tandem_alone(tmp_path):
    """By the tools of this environment, so that nothing is fetched."""
    pytest.importorskip("setuptools", minversion="77")
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    checkout.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "contract", "tandem"):
        (checkout / name).symlink_to(ROOT / name)
    build = "import setuptools.build_meta, sys; setuptools.build_meta.build_sdist(sys.argv[1])"
    made = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(made, check=True, cwd=checkout, stdout=subprocess.DEVNULL)
    (sdist,) = tmp_path.glob("tandem_train-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    pip += ["--no-index", "--disable-pip-version-check", "--target", str(installed)]
    subprocess.run([*pip, str(sdist)], check=True, cwd=tmp_path)
    (found,) = metadata.distributions(path=[str(installed)])
    assert (found.metadata["Name"], found.version) == ("tandem-train", __version__)
    assert found.requires == ["torch>=1.12"] and "sync.attach" in found.read_text("METADATA")
    paths = {str(path) for path in found.files}
    sent = standalone.files()
    assert {"tandem/py.typed", "tandem/contract/prices.json"} <= sent.keys() <= paths
    assert sent == {name: (installed / name).read_text() for name in sent}
    assert any(path.endswith("LICENSE") for path in paths)
    assert {path.split("/")[0].partition("-")[0] for path in paths} == {"tandem", "tandem_train"}
