"""While a run lives: code and guards to the machines, the watch, the next attempt."""
