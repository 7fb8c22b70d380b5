"""heretic (PyPI heretic-llm 1.4.0) on the contrast, the prompts and the scorer of a preset of emend.

    python heretic_search.py MODEL_FOLDER PRESET TRIALS OUT.json [--tokens 60] [--seed 0]

Its own program runs, with its own search. Set from outside: the prompts (of datasets/emend_directions.json, in files),
the keywords, the number of trials (a third of them at random, as 60 of its 200), and the way a keyword is looked for
(as a whole word, as emend's scorer "any" does). Packages that only its benchmarks and uploads use may be missing.
"""
import argparse
import json
import os
import pathlib
import re
import sys
import tempfile
import time
import types


def files(folder, document):
    for name, key in (("ask", "questions"), ("judge", "test_questions")):
        (folder / f"{name}.txt").write_text("\n".join(document[key]) + "\n")


def config(options, preset, folder):
    def prompts(file, system):
        return f'dataset = {json.dumps(str(folder / file))}\nsystem_prompt = {json.dumps(system)}\n'
    plain = "You are a helpful assistant."
    return f"""
dtypes = ["float32"]
device_map = "cpu"
batch_size = 32
max_response_length = {options.tokens}
n_trials = {options.trials}
n_startup_trials = {max(1, options.trials * 3 // 10)}
seed = {options.seed}
refusal_markers = {json.dumps(preset["scorer"]["words"])}
[good_prompts]
{prompts("ask.txt", preset["negative"])}
[bad_prompts]
{prompts("ask.txt", preset["positive"])}
[good_evaluation_prompts]
{prompts("judge.txt", plain)}
[bad_evaluation_prompts]
{prompts("ask.txt", plain)}
"""


def spaced(text):
    """The words of a text in one form, as the scorer "any" compares them."""
    return re.sub(r"(?:[^\w']|(?<!\w)'+|'+(?!\w))+", " ", text.lower().replace("\u2019", "'")).strip()


def stub(name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "preset", "trials", "out"):
        parser.add_argument(name, type=int if name == "trials" else str)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out = pathlib.Path(options.out).resolve()
    model = str(pathlib.Path(options.model).resolve())
    document = json.loads((pathlib.Path(__file__).parents[2] / "datasets" / "emend_directions.json").read_text())
    preset = next(one for one in document["presets"] if one["name"] == options.preset)
    folder = pathlib.Path(tempfile.mkdtemp())
    files(folder, document)
    (folder / "config.toml").write_text(config(options, preset, folder))
    os.chdir(folder)
    sys.argv = ["heretic", "--model", model]
    stub("lm_eval")
    stub("lm_eval.models")
    stub("lm_eval.models.huggingface", HFLM=object)

    import optuna
    import heretic.main
    from heretic.evaluator import Evaluator

    words = [spaced(word) for word in preset["scorer"]["words"]]

    def holds_a_word(self, text):
        text = f" {spaced(text)} "
        return any(f" {word} " in text for word in words)

    Evaluator.is_refusal = holds_a_word
    search, begin = optuna.Study.optimize, (time.time(), time.process_time())

    def timed(study, *arguments, **more):
        start = (time.time(), time.process_time())
        search(study, *arguments, **more)
        trials = [{"trial": trial.number, "kl": trial.user_attrs["kl_divergence"],
                   "score": 100 * trial.user_attrs["refusals"] / trial.user_attrs["n_bad_prompts"],
                   "before": 100 * trial.user_attrs["base_refusals"] / trial.user_attrs["n_bad_prompts"]}
                  for trial in study.trials if "kl_divergence" in trial.user_attrs]
        front = [one for one in trials if not any(
            (other["kl"], other["score"]) != (one["kl"], one["score"]) and other["kl"] <= one["kl"] and
            other["score"] <= one["score"] for other in trials)]
        out.write_text(json.dumps({"trials": trials, "front": sorted(front, key=lambda one: one["kl"]),
                                   "seconds": time.time() - begin[0], "trial_seconds": time.time() - start[0],
                                   "processor_seconds": time.process_time() - begin[1],
                                   "trial_processor_seconds": time.process_time() - start[1]}, indent=1))
        os._exit(0)

    optuna.Study.optimize = timed
    heretic.main.main()


if __name__ == "__main__":
    main()
