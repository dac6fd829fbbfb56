"""Have people compare, rank and mark answers on a local page, and summarise how far they agree."""
