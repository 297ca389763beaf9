"""Random combinations of features and layouts, each compared with the same training in one process."""
