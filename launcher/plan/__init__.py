"""Plans a run, and finds everything that could keep it from starting."""
