"""Samples, records and accounts as bytes, and back. Reading never executes anything that it reads."""
