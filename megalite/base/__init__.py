"""What every room stands on: errors, log lines, child processes, data sheets. Nothing here imports torch."""
