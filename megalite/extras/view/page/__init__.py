"""One page of a run, which a browser shows without a network (`megalite view`)."""
