"""What the scheduler remembers: records, states, queues, names, ranges. They decide nothing."""
