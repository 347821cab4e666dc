"""The one exception that is meant for the person at the keyboard."""


class UserError(Exception):
    """One clear sentence: what is wrong, with which file or argument, and what to do about it.

    The command line prints it and leaves with exit code 2; library users may catch it.
    """
