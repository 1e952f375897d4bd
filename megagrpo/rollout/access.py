"""The name that users give to the servers they start themselves: `--middleware megagrpo.rollout.access.TokenGuard`."""

from megagrpo.engine.access import TokenGuard as TokenGuard
