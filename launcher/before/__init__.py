"""Before a run: the questions to the machines, what is wrong with them, and the plan."""
