"""Which rows of the data are sampled, from how well the policy does on each of them."""
