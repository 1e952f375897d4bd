"""An environment: each response plays one game against its own instance."""


class NumberGame:
    """Find a number from 1 to 6."""

    def reset(self, secret, **columns):
        """Begin a game. `secret` is a column of games.jsonl."""
        self.secret, self.found = int(secret), False

    def guess(self, number: int) -> str:
        """Tries a number.

        Args:
            number: The guess, from 1 to 6.
        """
        self.found = self.found or number == self.secret
        return "correct" if number == self.secret else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        """1 for a game in which the number was found."""
        return float(self.found)
