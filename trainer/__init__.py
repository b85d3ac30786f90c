"""One process of a training run: from its options to its exit code.

Read in this order: `process.py` (one process, from its options to its exit code), `world.py` (the
other ranks), `build.py` (what a run trains with, as one `Job`), `train.py` (the loop), `step.py`
(one step of it), then `checkpoint.py` and `resume.py`. `data/` begins with `loader.py`.
"""
