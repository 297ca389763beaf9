"""Number formats of products (`--fp8`): files with `RECIPE`, found by name."""
