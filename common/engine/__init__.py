"""The engine that samples, its weight sync and checks, and the way of its responses to the scorers."""
