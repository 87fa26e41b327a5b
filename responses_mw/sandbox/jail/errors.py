"""The error of the parsers of documents."""


class Unreadable(Exception):
    """The document cannot be converted. The message is a sentence for the user."""


class Unsupported(Unreadable):
    """The document has a type that cannot be converted, whatever it contains."""
