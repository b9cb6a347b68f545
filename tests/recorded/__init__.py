"""Small real runs of two commits, compared number by number: `python -m tests.recorded --against COMMIT`."""
