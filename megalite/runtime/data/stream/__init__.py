"""Training straight from text: a catalogue of pieces, an order of their tokens, and a cache that workers fill.

The order is a function of the seed, the data and the position alone. Nothing else has a state: no buffer, no iterator,
no worker. So ranks, workers, kills and reading ahead change no sample.
"""
