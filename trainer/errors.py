"""Errors of a rank, and who prints them."""

import sys

from contract.errors import DATA_LOST, DIVERGED, RankError, UserError
from tandem.coordinates import ProcessCoordinates


class DataLost(RankError):
    """The images cannot be read any more, and no image is at fault."""

    code = DATA_LOST


class Diverged(UserError):
    """The run's numbers are not finite any more; all ranks know it."""

    code = DIVERGED


def report_error(error: UserError, coordinates: ProcessCoordinates) -> int:
    """Print the error, once per node if all ranks know it, and once per run if it concerns no
    machine; returns the exit code."""
    first = (coordinates.rank if isinstance(error, Diverged) else coordinates.local_rank) == 0
    if first or isinstance(error, RankError):
        print(f"trainer: {error}", file=sys.stderr)
    return error.code
