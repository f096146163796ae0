"""Model folders as files: what is in them, before a library that reads models is imported."""
