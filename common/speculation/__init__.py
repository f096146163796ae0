"""Several tokens of a response from one pass of the engine: guesses from the history, and which of them are kept."""
