"""What every process of a training run does."""
