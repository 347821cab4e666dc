"""How much a client may ask for, all in one place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Defaults for a machine with a gigabyte to spare."""

    body: int = 16_000_000
    """Bytes of a request."""
    file: int = 64_000_000
    """Bytes of a memory that is uploaded."""
    pixels: int = 25_000_000
    """Pixels of a picture; more are refused before anything is decoded."""
    decoding: int = 50_000_000
    """Pixels of pictures that are decoded at a time; the others wait."""
    side: int = 512
    """Pixels of a side of the pictures, or words of the texts, that a model which is uploaded sees."""
    inputs: int = 64
    """Pictures, texts or embeddings in one request."""
    name: int = 200
    """Characters of the name of a class, of a memory or of a file."""
    text: int = 10_000
    """Characters of a text."""
    width: int = 4096
    """Numbers of an embedding."""
    classes: int = 10_000
    """Classes of a memory."""
    examples: int = 100_000
    """Examples of a memory."""
    numbers: int = 40_000_000
    """Numbers of all keys of a memory: fewer examples where keys are wide."""
    memories: int = 10_000
    """Memories of a service."""
    store: int = 1_000_000_000
    """Bytes of the database; what does not fit is refused until a memory is deleted."""
    undo: int = 50
    """Changes of a memory that can be undone; what older ones forgot is deleted for good."""
    resident: int = 256_000_000
    """Bytes of memories that stay in RAM; those that were not used for longest are read from the database again."""
    requests: int = 256
    """Requests answered at a time."""
    head_seconds: float = 10.0
    """How long a client may take to say what it wants."""
    body_seconds: float = 30.0
    """How long it may take to send the rest."""
