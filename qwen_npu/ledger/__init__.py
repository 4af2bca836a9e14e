"""The record of what a run did: events (the vocabulary), store (the SQLite file), summary, perfetto, export."""
