"""Agent loops as a pool of Ray actors: `loop` has `RayAgentLoop`, `pool` its actors, `actor` the code that they run."""
