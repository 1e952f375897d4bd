"""Public name of TokenGuard for servers that users start themselves: `--middleware megagrpo.rollout.access.TokenGuard`."""

from megagrpo.engine.access import TokenGuard as TokenGuard
