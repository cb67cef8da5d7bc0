"""The client of a hosted storage: calls to one host, a storage made of them, several hosts as one storage."""
