"""All messages between PipeSwitch's own processes; one file for each pair of processes."""
