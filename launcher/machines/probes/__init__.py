"""The questions to machines, sent to their Python as source: our code is not there yet."""
