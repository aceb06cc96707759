"""Keys for clients on other machines: ZeroMQ with CURVE, on both sides, and who is admitted."""

CHECKS = {"keys": "curve_keys:check_keys"}
COMMANDS = {"keys": "command:keys"}
SCHEMES = {"tcp": "curve_bridge:connect"}  # with keys
SERVERS = {"curve": "curve_listener:open_listener"}
