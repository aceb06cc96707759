"""``make demo``: three models are served while a job trains, and compared with two baselines."""

COMMANDS = {"demo": "command:demo"}
