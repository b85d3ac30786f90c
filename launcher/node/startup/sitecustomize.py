"""Lets a rank answer its guard: on a signal, faulthandler writes the stack of its main thread
(launcher/node/stacks.py). A rank's Python runs this file before its script. The Python may be of
any version, so this file imports next to nothing. Then it runs the environment's own."""

import os
import sys

SELF = sys.modules[__name__]
FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def answer_signal():
    """Register faulthandler for the signal and the file that the guard named."""
    number, _, path = os.environ.pop("TANDEM_STACKS", "").partition(":")
    if path:
        import faulthandler

        SELF.file = open(path, "ab", 0)  # noqa: PTH123, SIM115 (open for as long as the process)
        # Only the main thread: to walk the frames of a thread that runs meanwhile is a SIGSEGV.
        faulthandler.register(int(number), SELF.file, all_threads=False)


def run_hidden_sitecustomize():
    """Run the sitecustomize of the environment, which this file hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[__name__])


try:
    answer_signal()
except Exception as error:  # a rank that cannot be asked still trains
    sys.stderr.write("tandem: this rank cannot say where it is: {}\n".format(error))
# Hide this folder from the script, and from other Pythons that the script starts.
sys.path[:] = [entry for entry in sys.path if entry != FOLDER]
entries = [entry for entry in os.environ.pop("PYTHONPATH", "").split(":") if entry != FOLDER]
if any(entries):
    os.environ["PYTHONPATH"] = ":".join(entries)
run_hidden_sitecustomize()
