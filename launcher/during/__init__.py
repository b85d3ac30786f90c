"""During a run: sending code and guards to the machines, the watch, the next attempt."""
