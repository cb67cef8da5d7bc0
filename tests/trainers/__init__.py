"""Tests against real trainers; `make test-trainers` runs them in an environment that has these."""
