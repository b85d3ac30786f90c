"""python -m trainer --check: find errors in the options on one machine, before any rank starts.

A name of torchvision's models is looked up in torchvision's source, without importing torch. Only a
user's model, and weights, are worth the seconds of an import: the model is built and computes one
step's gradients, and the weights are compared with the model.
"""

import difflib
import os
import sys
import traceback

from contract.errors import BAD_INPUT, UserError
from contract.options import DEFAULT_MODEL, Options

from .classifiers import classifier_names
from .errors import sentence_of


def check(options: Options) -> int:
    """Print notes on a run with these options, and any error. Return the exit code."""
    name = options.model
    try:
        names = classifier_names() if ":" not in name else []
        if names and name not in names:
            nearest = ", ".join(difflib.get_close_matches(name, names, 3) or names[:3])
            raise UserError(
                f"--model {name}: this torchvision has no such classifier; nearest: {nearest}. "
                "Your own: path/file.py:function."
            )
        if (":" in name and name != DEFAULT_MODEL) or options.weights:
            # Imported late: torch takes seconds, and most checks do without it.
            from . import models, weights

            # With one rank, a parameter without a gradient keeps nobody waiting.
            is_one_rank = int(os.environ.get("WORLD_SIZE", "1")) == 1
            unused_allowed = options.find_unused_parameters or is_one_rank
            arguments = options.model_arguments()
            model, notes = models.try_out(name, options.image_size, unused_allowed, arguments)
            if options.weights:
                tensors = weights.read_weights(options.weights).tensors
                fit = weights.fit_tensors(model, tensors, models.TRIAL_CLASSES)
                # Called only for its errors: the run prints the lines.
                fit.accept(f"--weights {options.weights}", name)
            for note in notes:
                print(note)
    except UserError as error:
        print(sentence_of(error), file=sys.stderr)
        return BAD_INPUT
    except Exception as error:  # in the user's own code
        frames = traceback.extract_tb(error.__traceback__)
        # The author of a model needs the last line of the model's code, not a library's.
        user_frames = [frame for frame in frames if "site-packages" not in frame.filename]
        frame = (user_frames or frames)[-1]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        location = f"{frame.filename}, line {frame.lineno}"
        error = UserError(f"--model {name}: {reason} ({location})")
        print(sentence_of(error), file=sys.stderr)
        return BAD_INPUT
    return 0
