"""What a classifier says to wrong input: our one-sentence error, and the ValueError that scikit-learn expects."""

from fastweights.utils.errors import UserError


class InputError(UserError, ValueError):
    """One clear sentence about what was given."""
