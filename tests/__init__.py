"""Tests of the library, and what the benchmark borrows from them: the oracle."""
