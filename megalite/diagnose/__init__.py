"""What is wrong with a cluster or a run: checks under torchrun, memory that does not fit, scaling."""
