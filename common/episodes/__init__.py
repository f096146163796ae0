"""What of an episode needs no engine: the model's replies as the episode gets them, its environment, its metrics."""
