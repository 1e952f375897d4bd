"""An environment: each response plays one game against its own instance."""


class NumberGame:
    """Find a number from 1 to 3."""

    def reset(self, secret, **columns):
        """Begin a game. `secret` is a column of games.jsonl."""
        self.secret, self.guesses, self.found = int(secret), 0, False

    def guess(self, number: int) -> str:
        """Tries a number.

        Args:
            number: The guess, from 1 to 3.
        """
        self.guesses += 1
        self.found = self.found or number == self.secret
        return "correct" if number == self.secret else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        """1 for a number that was found, 0.25 for a game with guesses, 0 for a game without."""
        return 1.0 if self.found else 0.25 if self.guesses else 0.0
