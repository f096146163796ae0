"""What fits into memory: the plan of a run, and what is offloaded to the host while the engine samples."""
