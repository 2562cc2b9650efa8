"""The one error type for what the user can mend: launch.py prints it as a line, without a traceback."""


class UserError(Exception):
    """Bad input. The message names the thing, the value found and the fix."""
