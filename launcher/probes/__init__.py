"""What machines are asked: sent to their Python as source, since no code of ours is there yet."""
