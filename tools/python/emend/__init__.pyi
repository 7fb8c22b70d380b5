from typing import Any, Optional

from ._emend import (Applied as Applied, Evaluation as Evaluation, Fact as Fact, Facts, FactSet as FactSet, ForwardResult as ForwardResult,
                     Hooks as Hooks, Model as Model, Pack as Pack, Patch as Patch, Path, Progress, Run as Run, Session as Session, Trace as Trace, apply_pack as apply_pack,
                     direct_ablate as direct_ablate, direct_bake as direct_bake, direct_fit as direct_fit, direct_optimise as direct_optimise,
                     direct_steer as direct_steer, editors as editors,
                     evaluate as evaluate, load as load, load_facts as load_facts, load_pack as load_pack, run as run, sites as sites)
from ._errors import Error as Error
from ._html import diff as diff

__version__: str

def edit(model: Model, facts: Facts, editor: str = "", *, allow_conflicts: bool = False, hparams: Optional[Path] = None, overrides: Optional[dict[str, Any]] = None,
         corpus: Path = "", statistics_tokens: int = 0, cache: Optional[Path] = "", seed: int = 0, engine: str = "fast", compute_dtype: str = "",
         progress: Optional[Progress] = True) -> Session: ...
