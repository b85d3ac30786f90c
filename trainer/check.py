"""python -m trainer --check: find what would fail, on one machine and before any rank starts.

A model of torchvision's is looked up in its source, without importing torch. Only a model of the
user's own, and weights, are worth the seconds of an import: the model is built and computes one
step's gradients, and the weights are compared with it.
"""

import difflib
import os
import sys
import traceback
from typing import List

from contract.errors import BAD_INPUT, UserError
from contract.options import DEFAULT_MODEL, Options

from .classifiers import classifier_names
from .errors import sentence_of


def check(options: Options) -> int:
    """Print what is worth knowing of a run with these options, and what would fail; return the exit
    code."""
    name = options.model
    try:
        known = classifier_names() if ":" not in name else []
        if known and name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, 3) or known[:3])
            raise UserError(
                f"--model {name}: this torchvision has no such classifier; nearest: {near}. "
                "Your own: path/file.py:function."
            )
        if (":" in name and name != DEFAULT_MODEL) or options.weights:
            for note in try_model(options):
                print(note)
    except UserError as error:
        print(sentence_of(error), file=sys.stderr)
        return BAD_INPUT
    except Exception as error:  # in the user's own code
        frames = traceback.extract_tb(error.__traceback__)
        # Frames of libraries say nothing to the author of a model.
        theirs = [frame for frame in frames if "site-packages" not in frame.filename]
        last = (theirs or frames)[-1]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        place = f"{last.filename}, line {last.lineno}"
        error = UserError(f"--model {name}: {reason} ({place})")
        print(sentence_of(error), file=sys.stderr)
        return BAD_INPUT
    return 0


def try_model(options: Options) -> List[str]:
    """Build the model, and load the weights into it; return what is worth saying. Raises
    UserError."""
    from . import models, weights

    # With one rank, a parameter without a gradient keeps nobody waiting.
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    allowed = options.find_unused_parameters or alone
    given = options.model_arguments()
    model, notes = models.try_out(options.model, options.image_size, allowed, given)
    if options.weights:
        name = f"--weights {options.weights}"
        fit = weights.fitting(model, weights.read_weights(options.weights).tensors, models.CLASSES)
        fit.refuse_another_net(name, options.model)
    return notes
