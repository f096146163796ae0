"""The forward pass of a packed row: the part of it that a rank runs, the images in it, the experts of its
tokens."""
