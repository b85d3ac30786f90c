"""After a run: collecting its files, and reporting on it."""
