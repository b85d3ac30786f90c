"""python -m trainer: train, predict or extract, under any launcher or none."""

import atexit
import gc
import os
import stat
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional

from contract.command_line import parse
from contract.errors import UserError
from contract.options import RESULTS_FOLDER
from contract.scratch import make_scratch, remove_scratch
from tandem.coordinates import read_coordinates

from .errors import report_error

# The variables that name torch.compile's and Triton's folders for compiled code. Some of the files
# are pickles, which run code when they are loaded. By default the folders are in /tmp, where
# another user may make them first.
COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def main(argv: Optional[List[str]] = None) -> int:
    """Run as one process of a run; return its exit code (docs/run-directory.md)."""
    try:
        # Tandem's launcher passes options that differ from machine to machine in the environment,
        # so that the command is the same on all machines.
        differing = ("data", "output", "device", "weights")
        values = {name: os.environ.get(f"TANDEM_{name.upper()}") for name in differing}
        from_launcher = {name: value for name, value in values.items() if value}
        options = parse(sys.argv[1:] if argv is None else argv, from_launcher)
        # After an out-of-memory exit, micro-batches are this part of their size.
        divisor = int(os.environ.get("TANDEM_MICRO_BATCH_DIVISOR", "1"))
        options = replace(options, accumulate=options.accumulate * divisor)
        if "TANDEM_OUTPUT" in os.environ:  # the launcher copies results from this folder
            folder = Path(os.environ["TANDEM_OUTPUT"], RESULTS_FOLDER)
            paths: Dict[str, Any] = {n: str(folder / f) for n, f in options.results.items()}
            options = replace(options, **paths)
    except UserError as error:
        return report_error(error, read_coordinates(os.environ))
    name_compile_caches()
    if options.check:
        from .check import check

        return check(options)
    # torch takes seconds to import, and --help and rejected options do not need torch. Without the
    # garbage collector the import takes a fourth less time. `freeze` exempts the imported modules
    # from later collections, since they are no garbage.
    gc.disable()
    from .process import begin

    gc.freeze()
    gc.enable()
    return begin(options) or 0  # (torch declares that `record` may swallow it)


def name_compile_caches() -> None:
    """Name folders for compiled code that no other user can enter, unless the environment names
    folders. Call this before the import of torch, which sets the variables itself."""
    # By the XDG specification, an empty value counts as unset.
    caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache")
    for name, folder in COMPILED.items():
        if name not in os.environ:
            os.environ[name] = private(Path(caches, "tandem", folder))
    # torch.compile would write precompiled headers to /tmp, even if TORCHINDUCTOR_CACHE_DIR is set.
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")


def private(folder: Path) -> str:
    """Make the folder if it is missing, and close it to other users. Return its path. If another
    user owns the folder, make a new folder among the temporary files."""
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if folder.is_absolute() and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            folder.chmod(0o700)
            return str(folder)
    except (OSError, RuntimeError):  # no home folder, or this user cannot write to it
        pass
    scratch, lock = make_scratch()
    atexit.register(remove_scratch, scratch, lock)
    return scratch


def run() -> NoReturn:
    """Run the process, and exit."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    if "torch" in sys.modules:
        from .process import leave

        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
