"""What every room stands on: errors, log lines, child processes, data sheets. Only `dtypes` imports torch."""
