"""The one error type for failures that a user can mend."""


class GncpriorError(Exception):
    """An expected failure; its text is one sentence that says what was wrong and what to do.

    The command prints that sentence and exits with code 2.
    """
