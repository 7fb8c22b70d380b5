from types import ModuleType

class Error(RuntimeError):
    kind: str
    where: str
    got: str
    expected: str
    advice: str
    def __init__(self, text: str, kind: str = "", where: str = "", got: str = "", expected: str = "", advice: str = "") -> None: ...

class ArgumentError(Error, TypeError): ...

def explain_calls(module: ModuleType) -> None: ...
