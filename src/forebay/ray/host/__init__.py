"""The host of a storage: calls that happen once, waits, streams, and the Ray actor around them."""
