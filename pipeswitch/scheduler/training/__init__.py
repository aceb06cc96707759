"""Jobs: their time, their memory, their commits."""
