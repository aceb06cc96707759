"""State of the scheduler: records, states, queues, names, ranges. No decisions."""
