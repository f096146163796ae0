"""Sets of flags by the names that other projects give them."""
