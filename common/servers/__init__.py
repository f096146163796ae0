"""Engines that are HTTP servers: what is asked of them, in the dialect of each, and who of them is there."""
