"""Where groups live: the contract (`base`) and the backends."""
