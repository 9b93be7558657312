"""A model that takes its experts from a pool."""
