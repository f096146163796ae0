"""What tools/same_as.py compares: a recorded batch, a script's numbers on it, and those of verl and TRL."""
