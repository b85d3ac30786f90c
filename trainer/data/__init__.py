"""Images on their way to a step, equal on any number of machines.

Read in this order: `folder.py` (what there is), `decode.py`, `augment.py`, `loader.py` (which rank
gets what in which step), `workers.py` (in which process), `batch.py` (on the device).
"""
