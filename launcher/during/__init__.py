"""During a run: code and guards go to the machines, the watch, the next attempt."""
