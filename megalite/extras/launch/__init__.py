"""Start one torchrun per host and make sure that nothing outlives the run: hosts, preflight, agent, runner."""
