"""The process group, and what travels between ranks."""
