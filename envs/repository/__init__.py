"""Repositories in which a model works: what it may do there, where that runs, and how its work is judged."""
