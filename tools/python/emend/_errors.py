"""The one exception that emend raises on purpose."""


class Error(RuntimeError):
    """kind is a word that programs branch on: "invalid argument", "not found", "corruption", "unsupported",
    "input/output", "device", "numeric" or "cancelled". The text has four parts: where, got, expected, advice (the last
    two may be empty)."""

    def __init__(self, text, kind="", where="", got="", expected="", advice=""):
        super().__init__(text)
        self.kind = kind
        self.where = where
        self.got = got
        self.expected = expected
        self.advice = advice
