"""Using a trained model: predictions and embeddings of the evaluation images."""

from .errors import UserError
from .options import Options
from .world import World


def infer(options: Options, world: World) -> int:
    raise UserError("--predict and --extract: not yet.")
