"""How packed sequences are laid out where what several of them begin with runs once."""
