"""The policy's turns for an agent, which may ask for several at once."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.engine.distribution import Generation, Home
from megagrpo.engine.protocol import derive_seed
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

    async def take(self, prompt: Prompt, sampling: SamplingParams, number: int) -> Rollout:
        """Take turn `number`."""
        seed = derive_seed(self.seed, prompt.prompt_id, self.index, number)
        if not self.is_free:
            other = self.session.beside(self.home)
            try:
                return await self.session.turn(prompt, sampling, seed, other)
            finally:
                self.session.close(other)
        self.is_free = False
        try:
            return await self.session.turn(prompt, sampling, seed, self.home)
        finally:
            self.is_free = True
