"""The run directory: the journal, metrics, samples, trackers, and what a resumed run reads again."""
