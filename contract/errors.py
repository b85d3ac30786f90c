"""Define the error for bad input, and the exit codes that say more than "failed"."""

# The launcher acts on the trainer's exit codes (docs/run-directory.md).
BAD_INPUT = 2
UNWRITTEN = 74  # finished, but this machine lacks records, checkpoints, results or the report
STOPPED = 75  # on request, after saving
OUT_OF_MEMORY = 76  # of the device: smaller micro-batches may fit
DIVERGED = 77  # the loss or the weights are no finite numbers any more
DATA_LOST = 78  # the disk or file server of the images fails: it may be well again later
INTERRUPTED = 130  # by Ctrl-C, as a shell reports it


class UserError(Exception):
    """An error that a user can fix: one or more sentences, each with the thing, the cause and the
    remedy. Programs print no traceback, and exit with `code`."""

    code = BAD_INPUT

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class RankError(UserError):
    """Bad input that only this rank detects; its peers only see a lost connection."""
