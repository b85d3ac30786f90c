"""Errors of a rank, and who prints them."""

import os
import sys

from contract.errors import DATA_LOST, DIVERGED, RankError, UserError
from contract.options import in_words_of_make
from tandem.coordinates import ProcessCoordinates


class DataLost(RankError):
    """The images cannot be read any more, and no image is at fault."""

    code = DATA_LOST


class Diverged(UserError):
    """The run's numbers are not finite any more; all ranks know it."""

    code = DIVERGED


def sentence_of(error: UserError) -> str:
    """Return the error in the words that the user typed, which are make's under the launcher."""
    return in_words_of_make(str(error)) if "TANDEM_OUTPUT" in os.environ else str(error)


def report_error(error: UserError, coordinates: ProcessCoordinates) -> int:
    """Print the error, once per node if all ranks know it, and once per run if it concerns no
    machine; return the exit code."""
    # A RankError is known to one rank only.
    is_first = (coordinates.rank if isinstance(error, Diverged) else coordinates.local_rank) == 0
    if is_first or isinstance(error, RankError):
        print(f"trainer: {sentence_of(error)}", file=sys.stderr)
    return error.code
