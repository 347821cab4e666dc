"""Token ids with a fixed meaning, which every vocabulary begins with."""

PAD, UNKNOWN, BLANK = 0, 1, 2
"""Token ids with a fixed meaning: padding behind a sentence, a word not to be seen, the word to be guessed."""
