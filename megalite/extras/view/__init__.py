"""Look at what is there: curves of runs, contents of checkpoints, pipeline schedules planned and recorded."""
