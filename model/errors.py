"""The one error of this folder that users see."""


class ModelError(Exception):
    """A model cannot be found, read or run. The message is one clear sentence that names the file or field."""
