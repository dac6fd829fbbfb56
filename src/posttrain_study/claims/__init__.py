"""Test claims of courses and papers in small: a card for each claim, an experiment for one or several."""
