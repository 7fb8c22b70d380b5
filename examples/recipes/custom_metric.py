"""A metric of one's own, before and after an edit: the rank of the new answer's first token."""
import sys

import emend

model = emend.load(sys.argv[1])
fact = emend.Fact("{} is in the city of", "The Eiffel Tower", "Rome")


def rank(asked):
    logits = model.trace(asked.full_prompt).logits[0, -1]
    return (logits > logits[model.encode(asked.full_prompt + " " + asked.target_new)[len(model.encode(asked.full_prompt))]]).sum().item() + 1


before = rank(fact)
session = emend.edit(model, fact, "rome", hparams=sys.argv[2] if len(sys.argv) > 2 else None)
after = rank(fact)
session.undo()
print(f"rank {before}, edited {after}, undone {rank(fact)}")
