"""How far the clock of a machine may be from the control machine's."""

# Seconds. What `make check` calls wrong, a run warns of, too.
TOLERANCE = 5.0
