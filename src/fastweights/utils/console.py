"""The one way to the terminal of all commands but those of `fastweights data`, which print tables and paths alone."""

from rich.console import Console

console = Console()


def say(sentence: str) -> None:
    """Print words with paths in them: as they are, and in one piece."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)
