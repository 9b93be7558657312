"""The project's benchmark: `python bench/run.py` checks, times and reports."""
