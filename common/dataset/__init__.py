"""Data files to tokenised prompts on disk."""
