"""Editing facts in language models.

    import emend
    model = emend.load("models/gpt2-xl")
    session = emend.edit(model, {"prompt": "{} is in", "subject": "The Eiffel Tower", "target_new": "Rome"})
    print(model.generate(["The Eiffel Tower is in"]))
    session.undo()

Tensors are torch tensors that share memory with the model. Errors are emend.Error.
"""
import os as _os

# Threads that wait sleep instead of spinning. OpenMP reads this when torch is loaded; a user's own choice wins.
if "GOMP_SPINCOUNT" not in _os.environ:
    _os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch as _torch  # noqa: F401  brings the LibTorch that the module uses into the process

from ._emend import (Applied, Evaluation, Fact, FactSet, ForwardResult, Hooks, Model, Pack, Patch, Run, Session, Trace, apply_pack,
                     editors, evaluate, load, load_facts, load_pack, run, sites)
from ._errors import Error
from ._html import diff

__version__ = "0.1.0"
__all__ = ["Applied", "Error", "Evaluation", "Fact", "FactSet", "ForwardResult", "Hooks", "Model", "Pack", "Patch", "Run",
           "Session", "Trace", "apply_pack", "diff", "edit", "editors", "evaluate", "load", "load_facts", "load_pack", "run", "sites"]


def edit(model, facts, editor="", **options):
    """Writes facts into a model and returns the Session, which can undo, go on, or save the edit.

    options are those of Session: hparams, overrides, corpus, statistics_tokens, cache, seed, engine, progress.
    """
    session = Session(model, editor, **options)
    session.edit(facts)
    return session
