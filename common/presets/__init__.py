"""The flags of the correction, and the sets of them that have a name in other projects."""
