"""Print Ansible's usual output without control characters, and less of it.

Ansible loads this plugin (ansible.cfg, stdout_callback). It prints one sentence for each machine
that did not answer role reach, and only the sentence of a task that rejects something. If role
reach chose another ansible-core, the plugin replaces this process with that ansible-core.
"""

import functools
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from ansible.plugins.callback.default import CallbackModule as Default
from ansible.utils.display import Display

from ansible import constants as C

# At the end of the list, as in filter_plugins/tandem.py: Ansible's modules come first.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from contract.text import clean

try:
    # The filters of all roles need it, and Ansible would miss them one by one.
    import msgspec  # noqa: F401
except ModuleNotFoundError:
    sys.exit(
        f"tandem: this Ansible runs with {sys.executable}, which has no msgspec. Use make, or "
        ".venv/bin/ansible-playbook of this checkout"
    )

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTATION = """
    name: tandem
    type: stdout
    short_description: the default screen, cleaned; a sentence for each machine without an answer
    extends_documentation_fragment:
      - default_callback
      - result_format_callback
"""


# Ansible prints everything by Display.display, also warnings and errors, which no callback sees. A
# text may come from a machine, so control characters are removed here.
display_unchanged = Display.display


@functools.wraps(display_unchanged)
def display_cleaned(self, msg, *words, **options):
    text = clean(msg) if isinstance(msg, str) else msg
    return display_unchanged(self, text, *words, **options)


Display.display = display_cleaned


class CallbackModule(Default):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "tandem"

    announced = False  # the sentence about asking the machines was printed

    def v2_playbook_on_task_start(self, task, is_conditional):
        if not is_reach(task):
            super().v2_playbook_on_task_start(task, is_conditional)
        elif not self.announced:
            self.announced = True
            self._say("Checking that the machines answer. If a machine is off, this takes 10 s.")

    def v2_playbook_on_stats(self, stats):
        # Role reach sets the version, before anything was changed.
        core = stats.custom.get("_run", {}).get("tandem_core")
        if core:
            self._say(f"Continuing with ansible-core {core} (make's variable CORE).")
            continue_with_core(core)
        self._display.banner("PLAY RECAP")
        for host in sorted(stats.processed):
            row = stats.summarize(host)
            has_failed = row["failures"] or row["unreachable"]
            color = (
                C.COLOR_ERROR if has_failed else C.COLOR_CHANGED if row["changed"] else C.COLOR_OK
            )
            names = ("ok", "changed", "unreachable", "failures")
            counts = [f"{name.replace('failures', 'failed')}={row[name]}" for name in names]
            # Ansible's usual line is wider than a terminal of 80 columns.
            line = f"{host:<20} : {' '.join(f'{count:<10}' for count in counts)}"
            self._display.display(line.rstrip(), color=color)

    def v2_runner_on_unreachable(self, result):
        # Role reach prints ssh's message and a remedy after all machines had time to answer.
        if not is_reach(result._task):
            super().v2_runner_on_unreachable(result)

    def v2_runner_on_ok(self, result):
        if not is_reach(result._task):
            super().v2_runner_on_ok(result)
        elif result._task.action.endswith("debug"):
            self._say(result._result.get("msg"))

    def v2_runner_item_on_ok(self, result):
        if not is_reach(result._task):
            super().v2_runner_item_on_ok(result)

    def v2_runner_on_failed(self, result, ignore_errors=False):
        # A failure without our sentence, such as a role's wrong argument, is printed as usual.
        message = result._result.get("msg")
        if is_reach(result._task) and isinstance(message, list):
            self._say(message)
        elif is_refusal(result) and not (ignore_errors or self._display.verbosity):
            host = result._host.get_name()
            prefix = "" if host == "localhost" else f"fatal: [{host}]: "
            sentence = f"{prefix}{message}"
            # Only a person gets wrapped lines. A program gets one line to search in.
            if sys.stdout.isatty():
                sentence = paragraph(sentence, shutil.get_terminal_size().columns)
            self._display.display(sentence, color=C.COLOR_ERROR)
        else:
            super().v2_runner_on_failed(result, ignore_errors)

    def _say(self, sentences):
        for sentence in sentences if isinstance(sentences, list) else [str(sentences)]:
            self._display.display(paragraph(sentence))


def continue_with_core(core):
    """Replace this process with the same command of another ansible-core; install it if missing.

    If the installation fails, tools/venv.sh prints the reason, and this function returns.
    """
    program = ROOT / f".venv-core{core}/bin/ansible-playbook"
    if subprocess.run([ROOT / "tools/venv.sh", f"core{core}"]).returncode == 0:
        sys.stdout.flush()
        path = f"{program.parent}:{os.environ['PATH']}"
        # ansible-core hides stdin, stdout and stderr from new programs.
        for descriptor in range(3):
            os.set_inheritable(descriptor, True)
        argv = [str(program), *sys.argv[1:]]
        os.execve(program, argv, {**os.environ, "PATH": path})  # noqa: S606


def is_reach(task):
    """Return true for a task of role reach."""
    return task._role is not None and task._role.get_name() == "reach"


def is_refusal(result):
    """Return true if a failure has a sentence of a role or playbook as its message."""
    action, text = result._task.action.rpartition(".")[2], result._result.get("msg")
    return action in ("fail", "assert") and isinstance(text, str) and text != "Assertion failed"


def paragraph(sentence, width=80):
    return textwrap.fill(
        sentence, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
