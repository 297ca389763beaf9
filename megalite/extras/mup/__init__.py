"""muP checked: activations over widths (`coordinates`), and the best learning rate over widths (`sweep`)."""
