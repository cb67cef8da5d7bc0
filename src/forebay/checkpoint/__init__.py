"""Checkpoint directories: files, publishing, the format of groups and its contents. Readers see whole checkpoints."""
