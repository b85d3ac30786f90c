"""What a run will do, and everything that could keep it from starting."""
