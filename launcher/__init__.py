"""How a run starts, lives and ends, seen from the control machine."""
