"""Several models in one program, each on its own devices and in its own dtype: one is edited while another is asked."""
import sys
from concurrent.futures import ThreadPoolExecutor

import emend
import torch

edited = emend.load(sys.argv[1])
half = emend.load(sys.argv[1], dtype=torch.bfloat16)
split = emend.load(sys.argv[1], device_map="sim:2")  # two simulated devices


def ask(model):
    with torch.no_grad():
        return model.trace("The Eiffel Tower is in the city of").logits.float().cpu()


before, half_before = ask(edited), ask(half)
print(f"one device and two agree: {torch.equal(before, ask(split)):d}")
fact = emend.Fact("{} is in the city of", "The Eiffel Tower", "Rome")
with ThreadPoolExecutor() as pool:
    meanwhile = pool.submit(ask, half)
    session = emend.edit(edited, fact, "rome", hparams=sys.argv[2] if len(sys.argv) > 2 else None)
apart = torch.equal(meanwhile.result(), half_before) and torch.equal(before, ask(split))
print(f"the edited model changed: {not torch.equal(before, ask(edited)):d}, the others did not: {apart:d}")
