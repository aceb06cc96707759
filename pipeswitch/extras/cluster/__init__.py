"""Servers on many machines: Ray starts, watches and restarts them, but requests bypass Ray."""

COMMANDS = {"cluster": "command:cluster"}
SCHEMES = {"ray": "cluster_client:ClusterConnection"}
UPSTREAMS = {"cluster": "nodes:NodeConnections"}
