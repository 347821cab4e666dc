"""What the service says no with: a status, and one sentence."""


class Refusal(Exception):
    """A request that is not answered as it was meant to be."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
