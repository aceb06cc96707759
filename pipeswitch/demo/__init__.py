"""``make demo``: three models beside a training job, measured against two baselines."""
