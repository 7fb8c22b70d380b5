from typing import Optional

from ._emend import Model

class Diff:
    weights: list[tuple[str, float, float]]
    others: list[tuple[str, Optional[list[int]], Optional[list[int]]]]
    def __init__(self, before: Model, after: Model) -> None: ...

def diff(before: Model, after: Model) -> Diff: ...
