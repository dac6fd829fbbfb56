"""Which move of which state is asked next."""
