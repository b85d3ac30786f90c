"""How a run starts, lives and ends, seen from the control machine."""

__version__ = "0.1.0"  # of this project; plan.json records it
