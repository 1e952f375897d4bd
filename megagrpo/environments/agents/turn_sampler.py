"""The policy's turns for an agent, which may ask for several at once."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.engine.http.protocol import derive_seed
from megagrpo.engine.load_balancing import Generation, Home
from megagrpo.engine.requests import OnTokens
from megagrpo.types import Prompt, Rollout, SamplingParams


@dataclass(eq=False)
class TurnSampler:
    """Takes the turns of conversation `index` of a prompt, at the conversation's own server. Each turn that the agent
    asks for while another one is under way has a slot of its own."""

    session: Generation
    home: Home
    index: int
    seed: int
    is_free: bool = True

    async def take(
        self, prompt: Prompt, sampling: SamplingParams, number: int, on_tokens: OnTokens | None = None
    ) -> tuple[Rollout, float]:
        """Take turn `number`, of which `on_tokens` gets the tokens as they come. Returns it, and the seconds that it
        has waited for a slot of its server."""
        seed = derive_seed(self.seed, prompt.prompt_id, self.index, number)
        if not self.is_free:
            other = self.session.beside(self.home)
            try:
                return await self.session.turn(prompt, sampling, seed, other, on_tokens), other.queued
            finally:
                self.session.close(other)
        self.is_free, queued = False, self.home.queued
        try:
            rollout = await self.session.turn(prompt, sampling, seed, self.home, on_tokens)
            return rollout, self.home.queued - queued
        finally:
            self.is_free = True
