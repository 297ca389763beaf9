"""Starting one torchrun per host and seeing to it that nothing outlives the run: hostfile, preflight, agent, runner."""
