"""How packed sequences are laid out where a prompt runs once for its group."""
