"""Servers on many machines: Ray starts, watches and restarts them, but requests bypass Ray."""

COMMANDS = {"cluster": "command:cluster"}
REPLIES = {"nodes": "node_lease:shown_table"}
SCHEMES = dict.fromkeys(("cluster", "ray"), "cluster_client:ClusterConnection")
UPSTREAMS = {"cluster": "nodes:NodeConnections"}
