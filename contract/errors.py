"""Define the error for bad input, and the exit codes that say more than "failed"."""

# The launcher acts on the trainer's exit codes (docs/run-directory.md).
BAD_INPUT = 2
UNWRITTEN = 74  # finished, but this machine lacks records, checkpoints, results or the report
STOPPED = 75  # on request, after saving
OUT_OF_MEMORY = 76  # of the device: smaller micro-batches may fit
DIVERGED = 77  # the loss or the weights became infinite or NaN
DATA_LOST = 78  # the disk or file server of the images fails, and may work again later
INTERRUPTED = 130  # by Ctrl-C, as a shell reports it


class UserError(Exception):
    """An error that a user can fix. Each sentence has the thing, the cause and the remedy. Programs
    print the sentences without a traceback, and exit with `code`."""

    code = BAD_INPUT

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class RankError(UserError):
    """Bad input that only this rank detects. The other ranks only see a lost connection."""
