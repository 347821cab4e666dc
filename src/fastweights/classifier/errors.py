"""What a classifier says to wrong input: our one-sentence error, and the ValueError that scikit-learn expects."""

from collections.abc import Hashable

from fastweights.utils.errors import UserError


class InputError(UserError, ValueError):
    """One clear sentence about what was given."""


class Contradiction(InputError):
    """The same input under two names."""

    def __init__(self, sentence: str, known: Hashable) -> None:
        super().__init__(sentence)
        self.known = known
        """The name under which it is known already."""
