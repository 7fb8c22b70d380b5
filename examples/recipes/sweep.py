"""Hyper-parameters side by side, a process each: every one has its own model."""
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import emend


def loss_with(rate):
    model = emend.load(sys.argv[1])
    fact = emend.Fact("{} is in the city of", "The Eiffel Tower", "Rome")
    emend.edit(model, fact, "rome", hparams=sys.argv[2] if len(sys.argv) > 2 else None, overrides={"v_lr": rate})
    logits = model.trace(fact.full_prompt).logits[0, -1]
    return -logits.log_softmax(-1)[model.encode(fact.full_prompt + " Rome")[len(model.encode(fact.full_prompt))]].item()


if __name__ == "__main__":
    rates = [0.01, 0.1, 0.5]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for rate, loss in zip(rates, pool.map(loss_with, rates)):
            print(f"v_lr {rate}: loss {loss:.2f}")
