"""The training loop and all that belongs to it."""
