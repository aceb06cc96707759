"""Every message between PipeSwitch's own processes: a file for each pair of processes."""
