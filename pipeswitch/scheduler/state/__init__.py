"""State of the scheduler: records, states, queues, names, ranges. It decides nothing."""
