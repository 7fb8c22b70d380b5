"""Editing facts in language models.

    import emend
    model = emend.load("models/gpt2-xl")
    session = emend.edit(model, {"prompt": "{} is in", "subject": "The Eiffel Tower", "target_new": "Rome"})
    print(model.generate(["The Eiffel Tower is in"]))
    session.undo()

Tensors are torch tensors that share memory with the model. Errors are emend.Error. torch is loaded when it is first needed, not by the import.
"""
import os as _os

from ._errors import Error

# Threads that wait sleep instead of spinning. OpenMP reads this when torch is loaded; a user's own choice wins.
if "GOMP_SPINCOUNT" not in _os.environ:
    _os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_MODULE = ["Applied", "Evaluation", "Fact", "FactSet", "ForwardResult", "Hooks", "Model", "Pack", "Patch", "Run", "Session", "Trace",
           "apply_pack", "direct_ablate", "direct_bake", "direct_fit", "direct_optimise", "direct_steer", "editors", "evaluate", "load", "load_facts", "load_pack", "run", "sites"]

__version__ = "0.1.0"
__all__ = sorted([*_MODULE, "Error", "diff", "edit"])


def __getattr__(name):
    if name not in _MODULE and name != "diff":
        raise AttributeError(f"module 'emend' has no attribute {name!r}")
    import torch  # noqa: F401  brings the LibTorch that the module uses into the process
    from . import _emend, _errors, _html
    _errors.explain_calls(_emend)
    globals().update({each: getattr(_emend, each) for each in _MODULE}, diff=_html.diff)
    return globals()[name]


def __dir__():
    return __all__


def edit(model, facts, editor="", *, allow_conflicts=False, **options):
    """Writes facts into a model and returns the Session, which can undo, go on, or save the edit.

    options are those of Session: hparams, overrides, corpus, statistics_tokens, cache, seed, engine, compute_dtype, progress; allow_conflicts edits facts that cannot be true together.
    """
    from . import Session
    session = Session(model, editor, **options)
    session.edit(facts, allow_conflicts=allow_conflicts)
    return session
