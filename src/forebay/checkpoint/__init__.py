"""Directories whose manifest is the commit point: a reader sees the old checkpoint or the new one, complete."""
