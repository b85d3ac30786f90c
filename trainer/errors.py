"""Define the errors of a rank, and print an error on the ranks that should print it."""

import os
import sys

from contract.errors import DATA_LOST, DIVERGED, RankError, UserError
from contract.options import in_words_of_make
from tandem.coordinates import ProcessCoordinates


class DataLost(RankError):
    """The images cannot be read any more, because their disk or file server fails."""

    code = DATA_LOST


class Diverged(UserError):
    """The run's numbers are not finite any more. Raised on all ranks."""

    code = DIVERGED


def sentence_of(error: UserError) -> str:
    """Return the error's text. Under the launcher, options have the names that `make` uses."""
    return in_words_of_make(str(error)) if "TANDEM_OUTPUT" in os.environ else str(error)


def report_error(error: UserError, coordinates: ProcessCoordinates) -> int:
    """Print the error once per node, or once per run if it concerns no machine (Diverged). Return
    the exit code."""
    # Only one rank raises a RankError.
    is_first = (coordinates.rank if isinstance(error, Diverged) else coordinates.local_rank) == 0
    if is_first or isinstance(error, RankError):
        print(f"trainer: {sentence_of(error)}", file=sys.stderr)
    return error.code
