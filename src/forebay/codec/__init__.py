"""Samples, records, accounts and plain values as bytes, and back. Reading never executes anything that it reads."""
