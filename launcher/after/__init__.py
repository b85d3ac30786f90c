"""After a run: its files, and what is said of it."""
