"""Before a run: what is asked of machines, what is wrong with them, the plan."""
