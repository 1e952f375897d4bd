"""The loopback interface, which other hosts cannot reach."""

LOOPBACK = "lo"
LOOPBACK_ADDRESS = "127.0.0.1"
