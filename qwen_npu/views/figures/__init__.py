"""Pure functions from a ledger to a plotly figure, each with a table twin of the same data."""
