"""Tests of the Python package, on the tiny model.

usage: python_package.py MODEL_FOLDER SCRATCH_FOLDER [EXPECTED_PACKAGE_FOLDER]      (the package is found by PYTHONPATH)
"""
import ast
import copy
import gc
import json
import pathlib
import pickle
import re
import shutil
import sys
import unittest
import warnings
import weakref

import numpy
import torch

import emend

torch.set_num_threads(1)
MODEL, SCRATCH = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
WHERE = sys.argv[3] if len(sys.argv) > 3 else None
FACTS = str(MODEL / "facts.jsonl")
MEMIT = {"hparams": str(MODEL / "memit.yaml"), "corpus": str(MODEL / "corpus.txt"), "statistics_tokens": 400}
TEXT = "The Eiffel Tower is in the city of"


def weights(model):
    return {name: tensor.clone() for name, tensor in model.parameters().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def target_loss(model, fact):
    """Mean negative log-likelihood of the new answer, computed here."""
    prompt, whole = model.encode(fact.full_prompt), model.encode(fact.full_prompt + " " + fact.target_new)
    log_probs = model.logits([whole])[0].log_softmax(-1)
    return -sum(log_probs[i - 1, whole[i]].item() for i in range(len(prompt), len(whole))) / (len(whole) - len(prompt))


class Case(unittest.TestCase):
    def refused(self, work, *words):
        """It is said in words of emend's, with what was got and what was expected."""
        with self.assertRaises(emend.Error) as caught:
            work()
        error = caught.exception
        self.assertTrue(error.where and error.got and error.expected, str(error))
        for word in words:
            self.assertIn(word, str(error))
        for foreign in ("pybind", "PYBIND", "emend._emend", "incompatible", "Unable to cast", "c10", "mat1"):
            self.assertNotIn(foreign, str(error))


class Tensors(Case):
    def test_parameters_share_memory_with_the_model(self):
        model = emend.load(str(MODEL))
        before = model.logits(TEXT)
        name = "model.layers.2.mlp.down_proj.weight"
        weight = model.parameters()[name]
        self.assertEqual(weight.data_ptr(), model.weight(name).data_ptr())
        with torch.no_grad():
            weight.mul_(1.5)
        after = model.logits(TEXT)
        self.assertGreater((after - before).abs().max().item(), 1e-4, "the C++ forward pass did not see the change")
        with torch.no_grad():
            model.weight(name).div_(1.5)
        self.assertTrue(torch.allclose(model.logits(TEXT), before, atol=1e-5))

    def test_a_tensor_outlives_its_model(self):
        model = emend.load(str(MODEL))
        weight = model.weight("model.norm.weight")
        kept = weight.clone()
        del model
        self.assertTrue(torch.equal(weight, kept))

    def test_logits_agree_with_arithmetic_in_torch(self):
        model = emend.load(str(MODEL), dtype=torch.float64)
        ids = model.encode(TEXT)
        result = model.forward([ids])
        self.assertEqual(tuple(result.logits.shape), (len(ids), model.vocab_size))
        self.assertFalse(result.stopped)
        scale = torch.rsqrt(result.hidden.pow(2).mean(-1, keepdim=True) + 1e-5)
        normed = result.hidden * scale * model.weight("model.norm.weight")
        expected = normed @ model.weight("model.embed_tokens.weight").T
        self.assertTrue(torch.allclose(result.logits, expected, atol=1e-10))

    def test_gradients_flow_to_a_weight(self):
        model = emend.load(str(MODEL))
        weight = model.weight("model.layers.1.mlp.up_proj.weight").requires_grad_(True)
        model.forward(TEXT, logit_tokens=[3]).logits.logsumexp(-1).sum().backward()
        self.assertGreater(weight.grad.abs().sum().item(), 0)
        weight.requires_grad_(False)

    def test_rows_of_all_kinds(self):
        model = emend.load(str(MODEL))
        ids = model.encode("ab")
        for rows in ("ab", ["ab"], ids, [ids], torch.tensor([ids])):
            self.assertTrue(torch.equal(model.logits(rows), model.logits("ab")))
        self.assertEqual(tuple(model.logits(["ab", "abc"]).shape), (2, 3, model.vocab_size))
        self.assertEqual(model.decode(ids), "ab")
        self.assertEqual(model.config["model_type"], "llama")
        self.assertEqual(model.device_map["model.layers.0"], "cpu")
        self.assertEqual(len(model.generate(["a", "bc"], max_new_tokens=3)), 2)


class Sites(Case):
    def test_capture_edit_and_stop(self):
        model = emend.load(str(MODEL))
        self.assertIn("layers.3.mlp_down_in", emend.sites(model))
        plain = model.logits(TEXT)
        with emend.Hooks(model).capture("layers.1.mlp_out").capture("layers.1.layer_out", tokens=[0, 2]) as hooks:
            model.forward(TEXT)
            self.assertEqual(tuple(hooks.captured("layers.1.mlp_out").shape), (len(TEXT), model.hidden_size))
            self.assertEqual(hooks.captured("layers.1.layer_out").shape[0], 2)
        with emend.Hooks(model).edit("layers.1.mlp_out", lambda value: value * 2):
            self.assertFalse(torch.allclose(model.logits(TEXT), plain))
        self.assertTrue(torch.equal(model.logits(TEXT), plain), "a hook outlived its scope")
        with emend.Hooks(model).stop_after("layers.0.layer_out"):
            self.assertTrue(model.forward(TEXT).stopped)

    def test_mistakes(self):
        model = emend.load(str(MODEL))
        with self.assertRaises(emend.Error) as caught:
            emend.Hooks(model).capture("layers.1.mlp_outt")
        self.assertIn("mlp_out", str(caught.exception))
        with self.assertRaises(emend.Error):  # never fired
            with emend.Hooks(model).capture("layers.1.mlp_out"):
                pass
        with self.assertRaises(emend.Error):  # another shape
            with emend.Hooks(model).edit("layers.1.mlp_out", lambda value: value[:1]):
                model.forward(TEXT)
        with self.assertRaises(ZeroDivisionError):  # Python's own exceptions come through
            with emend.Hooks(model).edit("layers.1.mlp_out", lambda value: 1 / 0):
                model.forward(TEXT)
        with self.assertRaisesRegex(emend.Error, "None or a tensor"):
            with emend.Hooks(model).edit("layers.1.mlp_out", lambda value: "a"):
                model.forward(TEXT)
        for given in (lambda x: x.to_sparse(), lambda x: x.to("meta"), lambda x: x + 1j):
            with self.assertRaisesRegex(emend.Error, "sparse|meta|complex"):
                with emend.Hooks(model).edit("layers.1.mlp_out", given):
                    model.forward(TEXT)
            self.refused(lambda: model.trace(TEXT, edit={"layers.1.mlp_out": given(torch.zeros(1, 1, 32))}))
        # Who needs the end of a pass is told where a hook takes it away.
        session = emend.Session(model, **MEMIT)
        with emend.Hooks(model).stop_after("layers.1.mlp_out"):
            for work in (lambda: model.logits(TEXT), lambda: model.generate(TEXT), lambda: emend.evaluate(model, FACTS, progress=None),
                         lambda: emend.evaluate(model, FACTS, ["free"], progress=None), lambda: session.edit(FACTS), lambda: model.trace(TEXT)):
                self.refused(work, "stop_after")
            model.forward(TEXT)

    def test_cycles_through_callbacks_are_collected(self):
        class App:
            def __init__(self):
                self.model = emend.load(str(MODEL))
                self.session = emend.Session(self.model, "memit", progress=self.on_progress, **MEMIT)
                self.hooks = emend.Hooks(self.model).edit("layers.1.mlp_out", self.change)
                self.patch = emend.Patch(self.change)

            def on_progress(self, *_):
                gc.collect()

            def change(self, value):
                return value * 2

        app = App()
        with app.hooks:
            app.model.logits(TEXT)
        app.session.edit(FACTS)
        gone = weakref.ref(app)
        del app
        gc.collect()
        self.assertIsNone(gone())


class Editing(Case):
    def test_edit_evaluate_undo(self):
        model = emend.load(str(MODEL))
        original, fingerprint = weights(model), model.current_fingerprint()
        facts = emend.load_facts(FACTS)
        self.assertEqual([fact.subject for fact in facts[::-1]], ["France", facts[0].subject])
        self.assertEqual((len(facts), facts[-1].subject), (2, "France"))
        before = emend.evaluate(model, facts)
        losses = [target_loss(model, fact) for fact in facts.facts]
        steps = []
        session = emend.edit(model, facts, editor="memit", overrides={"v_num_grad_steps": 10, "clamp_norm_factor": 10}, progress=lambda *step: steps.append(step), **MEMIT)
        self.assertEqual(session.hparams["v_num_grad_steps"], 10)
        self.assertEqual(session.failed, 0)
        self.assertIn("targets", {step[0] for step in steps})
        after = emend.evaluate(model, facts, before=before)
        self.assertIn("efficacy_success", after.summary["counterfact"])
        self.assertEqual(len(after.cases), 2)
        for fact, loss in zip(facts.facts, losses):
            self.assertLess(target_loss(model, fact), loss, "the target did not become more likely")
        changed = [name for name, tensor in model.parameters().items() if not torch.equal(tensor, original[name])]
        self.assertEqual(changed, ["model.layers.1.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight"])
        self.assertNotEqual(model.current_fingerprint(), fingerprint)
        session.undo()
        self.assertTrue(same(original, weights(model)))
        self.assertEqual(model.current_fingerprint(), fingerprint)

    def test_cancel_and_exceptions_leave_the_weights_alone(self):
        model = emend.load(str(MODEL))
        original = weights(model)
        session = emend.Session(model, "memit", progress=lambda phase, done, total, detail: phase != "insert", **MEMIT)
        with self.assertRaises(emend.Error) as caught:
            session.edit(FACTS)
        self.assertEqual(caught.exception.kind, "cancelled")
        self.assertEqual(caught.exception.where, "insert")
        self.assertTrue(same(original, weights(model)))

        def fail(*_):
            raise KeyError("mine")

        with self.assertRaises(KeyError):
            emend.edit(model, FACTS, progress=fail, **MEMIT)
        self.assertTrue(same(original, weights(model)))

    def test_facts_of_all_kinds(self):
        model = emend.load(str(MODEL))
        rome = {"hparams": str(MODEL / "rome.yaml"), "overrides": {"v_num_grad_steps": 1}}
        row = {"prompt": "{} is in", "subject": "Oslo", "target_new": "Rome"}
        fact = emend.Fact(**row, paraphrases=["Where is Oslo? In"])
        for facts in (row, [row], fact, [fact, fact], FACTS, pathlib.Path(FACTS)):
            session = emend.Session(model, "rome", **rome)
            self.assertGreaterEqual(len(session.edit(facts)["outcomes"]), 1)
            session.undo()
        self.assertEqual(fact.full_prompt, "Oslo is in")
        self.assertEqual(fact.to_dict()["target_new"], "Rome")
        with self.assertRaises(emend.Error):
            emend.Fact("no place for the subject", "Oslo", "Rome")

    def test_packs(self):
        model = emend.load(str(MODEL))
        original = weights(model)
        path = str(SCRATCH / "edit.safetensors")
        session = emend.edit(model, FACTS, **MEMIT)
        session.save_pack(path)
        session.save(SCRATCH / "again.safetensors")
        self.assertEqual((SCRATCH / "again.safetensors").read_bytes(), pathlib.Path(path).read_bytes())
        for form, file in (("peft", "adapter/adapter_config.json"), ("lora", "lora.gguf"), ("gguf", "edited.gguf"), ("model", "edited/config.json")):
            session.save((SCRATCH / file).parent if "/" in file else SCRATCH / file, form)
            self.assertTrue((SCRATCH / file).exists(), form)
        with self.assertRaises(emend.Error):
            session.save(SCRATCH / "floppy", "floppy")
        verdicts = session.verdicts()
        self.assertEqual([verdict["prompt"] for verdict in verdicts], [fact.full_prompt for fact in emend.load_facts(pathlib.Path(FACTS)).facts])
        for verdict in verdicts:
            self.assertIn(verdict["verdict"], ("said", "not_said"))
            self.assertEqual(verdict["verdict"] == "said", not verdict["reason"])
        edited = model.logits(TEXT)
        pack = emend.load_pack(pathlib.Path(path))
        self.assertEqual((pack.editor, len(pack.facts)), ("memit", 2))
        delta = pack.deltas()["model.layers.1.mlp.down_proj.weight"]
        self.assertEqual((delta.dtype, tuple(delta.shape)), (torch.float64, (32, 48)))
        session.undo()
        with emend.apply_pack(model, path) as applied:
            self.assertEqual(len(applied.changed), 2)
            self.assertTrue(torch.allclose(model.logits(TEXT), edited, atol=1e-5))
        self.assertTrue(same(original, weights(model)))
        kept = emend.apply_pack(model, pack)
        del kept
        self.assertFalse(same(original, weights(model)), "only revert() and the end of `with` take a pack out")
        other = SCRATCH / "other"
        shutil.copytree(MODEL, other, dirs_exist_ok=True)
        data = bytearray((other / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (other / "model.safetensors").write_bytes(data)
        with self.assertRaises(emend.Error):
            emend.apply_pack(emend.load(str(other)), pack)
        emend.apply_pack(emend.load(str(other)), pack, force=True)
        emend.apply_pack(emend.load(str(other)), pack, accept_base=[pack.base_fingerprint[:12]])

    def test_changes_are_taken_out_in_any_order(self):
        model, alone = emend.load(str(MODEL)), emend.load(str(MODEL))
        original = weights(model)
        one, two = ({"prompt": "{} is in", "subject": subject, "target_new": "Rome"} for subject in ("Oslo", "Bonn"))
        packs = []
        for number, fact in enumerate((one, two)):
            session = emend.edit(model, fact, **MEMIT)
            session.save_pack(SCRATCH / f"order-{number}.safetensors")
            packs.append(emend.load_pack(SCRATCH / f"order-{number}.safetensors"))
            session.undo()
            self.assertTrue(same(original, weights(model)))
        with emend.apply_pack(alone, packs[1]):
            second = weights(alone)
        below, above = (emend.apply_pack(model, pack) for pack in packs)
        below.revert()
        self.assertTrue(same(second, weights(model)), "the other pack is in force, and nothing else")
        below.revert()
        self.assertTrue(same(second, weights(model)), "there was nothing left to take out")
        self.refused(lambda: emend.apply_pack(model, packs[1]), "already in force", "revert it first")
        self.refused(lambda: emend.apply_pack(model, str(SCRATCH / "order-1.safetensors")), "already in force")
        below = emend.apply_pack(model, packs[0])
        above.revert()
        below.revert()
        self.assertTrue(same(original, weights(model)))
        emend.apply_pack(model, packs[1])  # nobody holds it: it stays
        self.refused(lambda: emend.apply_pack(model, packs[1]), "already in force")
        self.assertTrue(same(second, weights(model)))

    def test_edits_on_top_of_others_stay(self):
        model = emend.load(str(MODEL))
        original = weights(model)
        fact = {"prompt": "{} is in", "subject": "Oslo", "target_new": "Rome"}
        session = emend.edit(model, FACTS, **MEMIT)
        pack = session.pack()
        session.undo()
        with emend.apply_pack(model, pack):
            inside = emend.edit(model, fact, **MEMIT)
        change = {name: tensor - original[name] for name, tensor in model.parameters().items() if not torch.equal(tensor, original[name])}
        self.assertEqual((set(change), inside.failed), (set(inside.pack().deltas()), 0))
        for name, delta in inside.pack().deltas().items():
            self.assertTrue(torch.allclose(change[name].double(), delta, atol=1e-6), "the edit stays when the pack goes")
        edited = weights(model)
        later = emend.edit(model, FACTS, **MEMIT)
        session.undo()
        later.undo()
        self.assertTrue(same(edited, weights(model)), "a session that is undone leaves the others alone")
        inside.undo()
        self.assertTrue(same(original, weights(model)))
        run = emend.run(model, FACTS, out=str(SCRATCH / "below"), metrics=["none"], **MEMIT)
        session = emend.edit(model, fact, **MEMIT)
        run.undo()
        edited = weights(model)
        self.assertFalse(same(original, edited))
        run.undo()
        self.assertTrue(same(edited, weights(model)))
        session.undo()
        self.assertTrue(same(original, weights(model)))

    def test_nothing_is_saved_over_the_model(self):
        folder = SCRATCH / "mine"
        shutil.copytree(MODEL, folder, dirs_exist_ok=True)
        model = emend.load(str(folder))
        model.save(SCRATCH / "mine.gguf")
        own = emend.load(str(SCRATCH / "mine.gguf"))
        session = emend.edit(model, FACTS, **MEMIT)
        files = lambda: {path: path.read_bytes() for path in [*folder.rglob("*"), SCRATCH / "mine.gguf"] if path.is_file()}
        before = files()
        weights_file = folder / "model.safetensors"
        for save in (lambda: session.save_pack(weights_file), lambda: session.save(weights_file), lambda: session.save(folder, "model"),
                     lambda: session.save(folder / "adapter", "peft"), lambda: session.pack().save(weights_file), lambda: model.save(folder),
                     lambda: model.save(str(folder) + "/"), lambda: model.save(folder / "sub"), lambda: model.save(folder / "sub.gguf"),
                     lambda: own.save(SCRATCH / "mine.gguf"), lambda: emend.run(model, FACTS, out=folder, save=["model"], **MEMIT)):
            self.refused(save, "choose another place")
        self.assertEqual(before, files())

    def test_arguments_are_judged_as_the_programs_judge_options(self):
        model = emend.load(str(MODEL))
        out = SCRATCH / "never"
        run = lambda **options: lambda: emend.run(model, FACTS, out=out, **{**MEMIT, **options})
        self.refused(run(protocol="seq"), "sequential, lifelong, single")
        self.refused(run(batch_size=-1), "batch_size", "-1")
        self.refused(run(save=["nope"]), "nope", "pack")
        self.refused(lambda: emend.run(model, FACTS, resume=True, **MEMIT), "resume", "no out")
        self.refused(run(statistics_tokens=-3), "statistics_tokens")
        self.refused(lambda: emend.Session(model, **{**MEMIT, "statistics_tokens": -3}), "statistics_tokens", "-3")
        for work in (lambda: emend.run(model, [], out=out, **MEMIT), lambda: emend.edit(model, [], **MEMIT), lambda: emend.evaluate(model, [])):
            self.refused(work, "no facts")
        self.assertFalse(out.exists())
        fact = emend.Fact("{} is in", "Oslo", "Rome")
        session = emend.Session(model, **MEMIT)
        for work, *words in ((lambda: model.generate(["a", 5]), "inputs[1]", "int"), (lambda: model.generate([b"a"]), "bytes"), (lambda: model.generate(b"a"), "bytes"),
                             (lambda: model.generate(5), "inputs"), (lambda: model.trace(TEXT, [5]), "site"), (lambda: model.trace(TEXT, 5), "site"),
                             (lambda: model.trace([1.5]), "1.5"), (lambda: model.trace(torch.rand(1, 3)), "inputs"), (lambda: session.edit([5]), "facts", "int"),
                             (lambda: session.edit(5), "facts"), (lambda: model.project(torch.zeros(1, 7)), "[1, 7]"), (lambda: model.trace(TEXT, edit={"embedding": None}), "NoneType"),
                             (lambda: model.next_tokens(["x", "y"]), "2 texts"), (lambda: model.next_tokens("x", -1), "-1"), (lambda: model.forward("x", end_layer=-5), "-5"),
                             (lambda: model.decode([10**9]), "1000000000"), (lambda: emend.Session(model, overrides={"v_lr": 2**70}), "64 bits"),
                             (lambda: model.generate("x", max_tokens=3), 'did you mean "max_new_tokens"?'), (lambda: emend.load(), "path is missing"), (lambda: emend.load("x", "cpu"), "by name"),
                             (lambda: emend.Session(5), "model is 5", "emend.Model"), (lambda: emend.Fact("a {}", "b", 5), "target_new", "a text"), (lambda: model.edit_site("a"), "a whole number"),
                             (lambda: model.edit_site(numpy.float32(1.9)), "a whole number"), (lambda: model.generate("x", max_new_tokens=torch.tensor(1.9)), "max_new_tokens", "a whole number"),
                             (lambda: model.decode(numpy.array([72.9], numpy.float32)), "a list of whole numbers"), (lambda: emend.Patch("zero", heads=[numpy.float32(1)]), "heads"),
                             (lambda: emend.edit(model, FACTS.encode(), **MEMIT), "facts", "bytes"),
                             (lambda: emend.load_facts(FACTS)["a"], "FactSet[...]"), (lambda: emend.Session(model, seed=-1), "seed is -1")):
            self.refused(work, *words)
        for work in (lambda: emend.load(pfad="x"), lambda: emend.load(5), lambda: emend.load(MODEL, dtype=None), lambda: emend.load(MODEL, max_memory=5), lambda: emend.Session(model, hparams=5), lambda: emend.Session(model, overrides=5),
                     lambda: model.logits(None), lambda: model.trace(TEXT, 5), lambda: emend.apply_pack(model, None), lambda: session.edit(5), lambda: emend.direct_ablate(model, 5, out=out),
                     lambda: emend.direct_ablate(model, "d", out=out, layerz=1), lambda: emend.direct_ablate(model, "d", out=out, dir="d"), lambda: emend.direct_ablate(model, "d", out=out, layers=1)):
            with self.assertRaises(TypeError):
                work()
            self.refused(work)
        for work, *words in ((lambda: emend.direct_ablate(model, "d", out=out, layers=1), "a text"), (lambda: emend.direct_ablate(model, "d", out=out, spare_weight="x"), "a number"),
                             (lambda: emend.apply_pack(model, 5), "a Pack or the path"), (lambda: model.weight("model.norm"), 'did you mean "model.norm.weight"?'),
                             (lambda: model.weight("nope"), "did you mean"), (lambda: model.set_weight("model.norm.weight", torch.zeros(3)), "[3]", "[32]")):
            self.refused(work, *words)
        with self.assertRaisesRegex(IndexError, "facts\\[9\\]: there are 2 facts"):
            emend.load_facts(FACTS)[9]
        self.assertEqual(len(session.edit([fact, {"prompt": "{} is in", "subject": "Bonn", "target_new": "Rome"}])["outcomes"]), 2)

    def test_arguments_that_only_look_wrong(self):
        model = emend.load(str(MODEL))
        for work in (lambda: emend.Hooks(None), lambda: emend.Session(None, **MEMIT), lambda: emend.run(None, FACTS, **MEMIT),
                     lambda: emend.apply_pack(None, "x"), lambda: emend.direct_fit(None),
                     lambda: emend.direct_fit(None, out="x")):
            self.refused(work, "model is None", "emend.Model")
        self.refused(lambda: emend.direct_steer(model, out="x"), "directions is missing", "directions")
        ids = model.encode(TEXT)
        self.assertEqual(model.decode(torch.tensor(ids)), model.decode(ids))
        rows = model.logits(ids)
        self.assertTrue(torch.equal(model.logits([torch.tensor(ids)]), rows))
        for plain in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
            with plain:
                self.assertTrue(torch.equal(model.logits(ids), rows))
                emend.edit(model, FACTS, **MEMIT).undo()
        facts = emend.load_facts(FACTS)
        before = emend.evaluate(model, facts, ["easyedit"], progress=None)
        self.refused(lambda: emend.evaluate(model, list(facts)[::-1], ["easyedit"], before=before), "before", "other facts")
        self.refused(lambda: emend.evaluate(model, facts, progress=3), "progress", "function")
        self.refused(lambda: emend.Session(model, overrides={"layers": [float("nan")]}), "layers", "finite")

        def loud(_):
            raise TypeError("f(): incompatible function arguments. The following argument types are supported")
        with self.assertRaisesRegex(TypeError, "f\\(\\)"), emend.Hooks(model).edit("embedding", loud):
            model.forward(TEXT)

    def test_texts_are_whole_and_places_named(self):
        model, half = emend.load(str(MODEL)), "a\ud800b"
        session = emend.edit(model, FACTS, **MEMIT)
        row = {"prompt": "{} is in", "subject": "Oslo", "target_new": "Rome"}
        for work in (lambda: model.generate(["a", half]), lambda: model.encode(half), lambda: emend.Fact(**{**row, "subject": half}),
                     lambda: session.edit({**row, "subject": half}), lambda: session.edit({**row, half: 1}), lambda: session.edit(half), lambda: emend.load(half),
                     lambda: emend.load_facts(half), lambda: emend.apply_pack(model, half), lambda: emend.Session(model, hparams=half),
                     lambda: emend.Session(model, overrides={half: 1}), lambda: emend.load(MODEL, dtype=half), lambda: emend.evaluate(model, FACTS, [half])):
            self.refused(work, "lone surrogate", "whole characters")
        self.refused(lambda: emend.load(b"x"), "bytes", "a path")
        for save in (lambda: session.save(""), lambda: session.save("", "model"), lambda: session.save_pack(""), lambda: session.pack().save(""), lambda: model.save("")):
            self.refused(save, "an empty path")

    def test_a_fact_comes_back_from_its_dictionary(self):
        rows = [{"case_id": 7, "prompt": "{} is in", "subject": "Oslo", "target_new": "Rome", "target_true": "Norway", "target_true_aliases": ["Norge"], "relation_id": "P17",
                 "paraphrase_prompts": ["Where is Oslo? In"], "neighborhood_prompts": ["Bergen is in"], "attribute_prompts": ["Milan is in"], "generation_prompts": ["Oslo is"],
                 "distracting_neighborhood_prompts": ["Oslo is in Rome. Bergen is in"], "locality": {"loc": [{"prompt": "Who?", "answers": ["Me", "I"]}]},
                 "portability": {"one_hop": [{"prompt": "Which language?", "answers": ["Italian"]}]}, "extra": {"note": {"of": [1, None]}}}]
        for fact in [emend.Fact(**rows[0]), *emend.load_facts(FACTS).facts]:
            self.assertEqual(emend.Fact(**fact.to_dict()).to_dict(), fact.to_dict())
        self.assertEqual(emend.Fact(**rows[0]).to_dict(), rows[0])
        self.assertEqual(emend.Fact(**rows[0], paraphrases=["x"]).paraphrases, ["x", "Where is Oslo? In"])
        for wrong, word in (({"extra": [1]}, "extra"), ({"locality": {"loc": 3}}, "locality"), ({"notes": 1}, "notes"), ({"relation_id": 3}, "relation_id")):
            self.refused(lambda: emend.Fact("{} is in", "Oslo", "Rome", **wrong), word)
        with self.assertRaises(emend.Error) as caught:
            emend.Fact("{} is in", "Oslo", "Rome", locality=5)
        self.assertEqual(caught.exception.kind, "invalid argument")

    def test_a_pack_beside_the_weights_stays_with_the_model(self):
        model = emend.load(str(MODEL))
        plain = model.logits(TEXT)
        (SCRATCH / "grace.yaml").write_text("layers: [2]\neps: 0.05\nval_init: warm\nn_iter: 20\nedit_lr: 0.3\n")
        session = emend.edit(model, FACTS, "grace", hparams=SCRATCH / "grace.yaml", progress=None)
        edited, pack = model.logits(TEXT), session.pack()
        self.assertFalse(torch.equal(edited, plain))
        session.save(SCRATCH / "grace_model", "model")
        with self.assertWarnsRegex(UserWarning, "edits beside its weights in force"):
            emend.load(SCRATCH / "grace_model")
        del session
        self.assertTrue(torch.equal(model.logits(TEXT), plain))
        with emend.apply_pack(model, pack):
            self.assertTrue(torch.equal(model.logits(TEXT), edited))
        self.assertTrue(torch.equal(model.logits(TEXT), plain))
        emend.apply_pack(model, pack)  # nobody holds it
        self.assertTrue(torch.equal(model.logits(TEXT), edited))
        self.refused(lambda: emend.apply_pack(model, pack), "already in force")

    def test_what_speaks_through_the_prompt(self):
        model = emend.load(str(MODEL))
        (SCRATCH / "ike.yaml").write_text("k: 4\n")
        session = emend.edit(model, FACTS, "ike", hparams=SCRATCH / "ike.yaml", progress=None)
        fact = emend.load_facts(FACTS)[0]
        front = session.prefix(fact.full_prompt)
        self.assertIn("Rome", front)
        self.assertEqual(session.asked(FACTS)[0].full_prompt, front + fact.full_prompt)
        asked = []
        emend.evaluate(model, FACTS, ["counterfact"], progress=None, front=lambda prompt: asked.append(prompt) or session.prefix(prompt))
        self.assertIn(fact.paraphrases[0], asked)
        with self.assertRaises(ZeroDivisionError):
            emend.evaluate(model, FACTS, ["counterfact"], progress=None, front=lambda prompt: 1 / 0)
        with emend.apply_pack(model, session.pack()) as applied:
            self.assertEqual(applied.prefix(fact.full_prompt), front)
        self.assertEqual((applied.prefix(fact.full_prompt), emend.Session(model, **MEMIT).prefix("x")), ("", ""))
        self.refused(lambda: emend.Session(model, **MEMIT, compute_dtype="half"), "auto, float32, tf32 or bfloat16")

    def test_warnings_are_python_s(self):
        path = SCRATCH / "blank.jsonl"
        path.write_text(pathlib.Path(FACTS).read_text() + '{"prompt": "{} is", "subject": "Oslo", "target_new": ""}\n')
        with self.assertWarnsRegex(UserWarning, "1 of 3 rows have no target") as caught:
            facts = emend.load_facts(path)
        self.assertEqual((len(facts), facts.skipped, caught.filename), (2, 1, __file__))
        model = emend.load(str(MODEL))
        original = weights(model)
        (SCRATCH / "few.txt").write_text("Oslo is a town\n")
        few = {"hparams": MEMIT["hparams"], "corpus": SCRATCH / "few.txt", "cache": None, "progress": None}
        with self.assertWarnsRegex(UserWarning, "the second moment is singular"), self.assertRaisesRegex(emend.Error, "not positive definite"):
            emend.edit(model, FACTS, **few)
        with warnings.catch_warnings(), self.assertRaises(UserWarning):
            warnings.simplefilter("error")
            emend.edit(model, FACTS, **few)
        self.assertTrue(same(original, weights(model)))

    def test_facts_are_values(self):
        facts = emend.load_facts(FACTS)
        for other in (pickle.loads(pickle.dumps(facts)), copy.copy(facts), copy.deepcopy(facts)):
            self.assertEqual((list(other), other.fingerprint, other.format), (list(facts), facts.fingerprint, facts.format))
        fact = copy.copy(facts[0])
        self.assertTrue(fact == facts[0] and fact != facts[1] and fact != 5)
        self.assertEqual(len({fact, *facts}), 2)
        self.assertTrue(facts == emend.load_facts(FACTS) and facts != emend.load_facts(FACTS, limit=1))
        groups = [{"case_id": 3, "requested_rewrite": [{"prompt": "{} is in", "subject": "Oslo", "target_new": {"str": "Rome"}, "target_true": {"str": "Norway"}}], "questions": ["Where?"],
                   "answer": "Norway", "new_answer": "Rome", "single_hops": [], "new_single_hops": [{"question": "q", "cloze": "c", "answer": "Rome", "answer_alias": []}]}]
        path = SCRATCH / "mquake.json"
        path.write_text(json.dumps(groups))
        grouped = emend.load_facts(path)
        again = pickle.loads(pickle.dumps(grouped))
        self.assertEqual((again.format, pickle.dumps(again)), ("mquake", pickle.dumps(grouped)))

    def test_save_and_load_again(self):
        model = emend.load(str(MODEL))
        session = emend.edit(model, FACTS, **MEMIT)
        changed = model.save(str(SCRATCH / "saved"))
        self.assertEqual(len(changed), 2)
        self.assertTrue(torch.equal(emend.load(str(SCRATCH / "saved")).logits(TEXT), model.logits(TEXT)))
        model.save(str(SCRATCH / "saved.gguf"))
        self.assertTrue(torch.allclose(emend.load(str(SCRATCH / "saved.gguf")).logits(TEXT), model.logits(TEXT), atol=1e-4))
        del session


class Runs(Case):
    def test_a_run_edits_judges_reports_and_resumes(self):
        out = str(SCRATCH / "run")
        model = emend.load(str(MODEL))
        original = weights(model)
        first_batch = SCRATCH / "run" / "checkpoint" / "batch-000000.safetensors"
        options = {"out": out, "batch_size": 1, "metrics": ["counterfact"], "eval_at": ["each"], "cache": str(SCRATCH / "cache"), **MEMIT}
        with self.assertRaises(emend.Error):
            emend.run(model, FACTS, progress=lambda *_: not first_batch.exists(), **options)
        self.assertTrue(same(original, weights(model)), "an interrupted run leaves a model as it was")
        self.assertTrue(first_batch.exists())
        # ----- what a program says -----
        model = emend.load(str(MODEL))
        run = emend.run(model, FACTS, resume=True, **options)
        print(run.summary)
        score = run.results["metrics"]["counterfact"]["post"]["efficacy_success"]
        # -------------------------------
        self.assertIsInstance(score, float)
        edits = run.results["edits"]
        self.assertEqual((edits["applied"], edits["said"] + edits["not_said"], edits["failed"]), (2, 2, 0))
        self.assertEqual((run.failed, run.results["batches"]), (0, 2))
        self.assertEqual([case["verdict"] for case in run.cases].count("said"), edits["said"])
        self.assertRegex(repr(run), "^<emend.Run memit: 2 facts, .*>$")
        self.assertEqual(run.results["retention"]["edits_applied"], [1, 2])
        self.assertEqual(len(run.results["guard"]), 2, "of the batch that was there already, too")
        for file in ("report.html", "results.json", "cases.jsonl", "edit.safetensors"):
            self.assertTrue((SCRATCH / "run" / file).exists(), file)
        self.assertFalse(same(original, weights(model)))
        run.undo()
        self.assertTrue(same(original, weights(model)))
        for save in ([], ["none"]):
            out = SCRATCH / f"nothing-{len(save)}"
            emend.run(model, FACTS, out=out, metrics=["none"], save=save, **MEMIT).undo()
            self.assertTrue((out / "results.json").exists())
            self.assertFalse((out / "edit.safetensors").exists())
        with self.assertRaises(emend.Error):
            emend.run(model, FACTS, "rome", hparams=str(MODEL / "rome.yaml"), out=str(SCRATCH / "bad"), protocol="single", save=["model"])


class Traces(Case):
    def setUp(self):
        self.model = emend.load(str(MODEL))

    def test_sites_tokens_and_logits(self):
        run = self.model.trace(TEXT, ["layers.3.attn_pattern", "layers.3.attn_q"])
        length = len(run.tokens)
        self.assertEqual((run.sites, length), (["layers.3.attn_q", "layers.3.attn_pattern"], len(self.model.encode(TEXT))))
        pattern = run["layers.3.attn_pattern"]
        self.assertEqual(tuple(pattern.shape), (1, 4, length, length))
        self.assertTrue(torch.allclose(pattern.sum(-1), torch.ones(1, 4, length), atol=1e-5))
        self.assertEqual(pattern.triu(1).abs().max().item(), 0)
        self.assertEqual(pattern.numpy().__array_interface__["data"][0], pattern.data_ptr(), "numpy copied")
        self.assertTrue(torch.allclose(run.logits, self.model.logits(TEXT), atol=1e-5))
        self.assertEqual("".join(run.tokens[slice(*run.span("Eiffel Tower"))]), "Eiffel Tower")
        two = self.model.trace([TEXT, "Oslo"], "layers.0.layer_out")
        self.assertEqual(("".join(two.tokens[1]), two.ids[1]), ("Oslo", self.model.encode("Oslo")))
        self.assertTrue(torch.equal(two.at("layers.0.layer_out", 1, -1), two["layers.0.layer_out"][1, 3]))

    def test_changes(self):
        z, plain = "layers.1.attn_z", self.model.trace(TEXT, ["layers.1.attn_z"])
        run = lambda change: self.model.trace(TEXT, [z], edit={z: change})

        def in_place(value):
            value[:, :, 2] = 0

        expected = run(emend.Patch("zero", heads=[2]))
        self.assertGreater((expected.logits - plain.logits).abs().max().item(), 1e-5)
        for same in (in_place, lambda value: numpy.where(numpy.arange(4)[:, None] == 2, 0, value.numpy())):
            self.assertTrue(torch.equal(run(same).logits, expected.logits))
        self.assertTrue(torch.equal(run(plain).logits, plain.logits), "its own value")
        self.assertTrue(torch.equal(run([0.5, emend.Patch(0.25, add=True)])[z], torch.full_like(plain[z], 0.75)))
        self.assertTrue(torch.allclose(run("mean")[z][0, 5], plain[z][0].mean(0), atol=1e-6))
        self.assertTrue(torch.allclose(run(emend.Patch(plain, add=True))[z], 2 * plain[z]))
        pair, pattern = [TEXT, TEXT + " the"], "layers.1.attn_pattern"
        for site in (z, pattern):  # a trace's own tensor, of rows of unequal length, is what it was
            own = self.model.trace(pair, [site])
            self.assertTrue(torch.equal(self.model.trace(pair, edit={site: own[site]}).logits, self.model.trace(pair, [site]).logits))
        four = self.model.trace([self.model.encode(TEXT)[:4]], [pattern])  # as many tokens as heads: nothing is turned round
        even = torch.tril(torch.ones(4, 4)) / torch.arange(1, 5)[:, None]
        self.assertTrue(torch.equal(self.model.trace([four.ids[0]], [pattern], edit={pattern: even})[pattern][0, 0], even))
        longer = self.model.trace("Oh " + TEXT, [z])
        added = run(emend.Patch(longer, add=True, tokens=[-1], heads=[1]))[z] - plain[z]
        self.assertTrue(torch.allclose(added[0, -1, 1], longer[z][0, -1, 1], atol=1e-6))
        self.assertEqual(added.count_nonzero(), added[0, -1, 1].count_nonzero())
        self.assertTrue(z in plain and "layers.0.attn_z" not in plain and list(plain) == [z])
        for change in ("mean", "zero", in_place):
            with self.assertRaisesRegex(emend.Error, "add=True"):
                run(emend.Patch(change, add=True))
        moved = torch.zeros(self.model.hidden_size, requires_grad=True)
        self.model.trace(TEXT, edit={"layers.1.mlp_out": emend.Patch(moved, add=True, tokens=[-1])}).logits[0, -1, 5].backward()
        self.assertGreater(moved.grad.abs().sum().item(), 0)
        for change, words in ((emend.Patch("zero", heads=[9]), "head 9"), ("nought", "nought"), (lambda value: value[0], "keeps the shape")):
            with self.assertRaises(emend.Error) as caught:
                run(change)
            self.assertIn(words, str(caught.exception))
        with self.assertRaises(emend.Error) as caught:
            self.model.trace(TEXT, ["layers.0.router"])
        self.assertEqual(caught.exception.kind, "unsupported")
        with self.assertRaises(KeyError):
            run(lambda value: {}["mine"])
        self.assertTrue(torch.equal(self.model.trace(TEXT).logits, plain.logits))

    def test_small_conveniences(self):
        logits = self.model.logits(TEXT)[0, -1]
        text, probability, best = self.model.next_tokens(TEXT, 3)[0]
        self.assertEqual((best, text), (logits.argmax().item(), self.model.decode([best])))
        self.assertAlmostEqual(probability, logits.softmax(-1).max().item(), places=5)
        self.assertEqual(self.model.embedding().data_ptr(), self.model.weight("model.embed_tokens.weight").data_ptr())
        self.assertEqual(tuple(self.model.weight_at("layers.0.attn_k").shape), (2, 8, 32))
        last = self.model.trace(TEXT, ["layers.3.layer_out"]).at("layers.3.layer_out", 0, -1)
        self.assertTrue(torch.allclose(self.model.project(last[None])[0], logits, atol=1e-5))

    def test_notebooks_show_them(self):
        shown = self.model.trace("a<b", ["layers.0.attn_scores", "layers.0.mlp_up"])._repr_html_()
        self.assertTrue("&lt;" in shown and "layers.0.mlp_up" in shown and "nan" not in shown and "<b" not in shown.replace("<br", ""), shown)
        scores = type("Scores", (dict,), {"tokens": ["a", "b"], "sites": ["layers.0.attn_scores"]})
        shown = scores({"layers.0.attn_scores": torch.tensor([[[[-3.0, -torch.inf], [-1.0, -2.0]]]])})
        self.assertEqual(re.findall(r"172,([\d.]+)\)", emend._html._trace(shown)), ["0.000", "1.000", "0.500"], "scores are often negative")
        other = emend.load(str(MODEL))
        self.assertEqual(repr(emend.diff(self.model, other)), "no difference")
        session = emend.edit(other, FACTS, **MEMIT)
        self.assertEqual([name for name, *_ in emend.diff(self.model, other).weights],
                         [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (1, 2)])
        self.assertIn("down_proj", emend.diff(self.model, other)._repr_html_())
        wider = lambda parameters: type("Wider", (), {"parameters": lambda self: parameters})()
        diff = emend.diff(wider({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(1)}), wider({"a": torch.zeros(2), "b": torch.ones(3)}))
        self.assertEqual((len(diff.weights), diff.others), (1, [("b", [2], [3]), ("c", [1], None)]))
        self.assertIn("b: of another shape ([2], [3])", repr(diff))
        self.assertIn("Eiffel", emend.load_facts(FACTS)._repr_html_())
        shown = [self.model, emend.load_facts(FACTS), session, session.pack(), self.model.trace("x", ["embedding"]), self.model.forward("x"), emend.evaluate(self.model, FACTS, ["counterfact"], progress=None)]
        for each, words in zip(shown, ("llama, 4 layers", "2 facts", "memit: 2 facts edited", "2 weights", "embedding", "logits [", "counterfact")):
            self.assertRegex(repr(each), f"^<emend.{type(each).__name__}.*{re.escape(words)}.*>$")


class Process(Case):
    def test_errors_have_four_parts(self):
        with self.assertRaises(emend.Error) as caught:
            emend.load(str(MODEL / "nothing"))
        self.assertEqual(caught.exception.kind, "not found")
        self.assertTrue(caught.exception.where and caught.exception.got)
        self.assertIsInstance(caught.exception, RuntimeError)
        with self.assertRaises(emend.Error) as caught:
            emend.Session(emend.load(str(MODEL)), "memmit")
        error = caught.exception
        self.assertEqual((error.kind, error.where), ("invalid argument", "editor"))
        self.assertIn("memmit", error.got)
        self.assertIn("rome", error.expected)
        self.assertEqual(error.advice, 'did you mean "memit"?')

    def test_contradictions_are_refused_as_by_the_programs(self):
        model = emend.load(str(MODEL))
        two = [{"prompt": "The capital of {} is", "subject": "Kenya", "target_new": target} for target in ("Oslo", "Rome")]
        before = weights(model)
        with self.assertRaises(emend.Error) as caught:
            emend.edit(model, two, **MEMIT)
        self.assertIn("facts[1]", caught.exception.where)
        self.assertIn("facts[0]", str(caught.exception))
        self.assertTrue(same(weights(model), before))
        emend.edit(model, two, allow_conflicts=True, **MEMIT)
        self.assertFalse(same(weights(model), before))

    def test_models_do_not_meet_and_devices_can_be_simulated(self):
        one, two = emend.load(str(MODEL)), emend.load(str(MODEL), device_map="sim:2")
        before = two.logits(TEXT).cpu()
        self.assertTrue(torch.equal(one.logits(TEXT), before))
        emend.edit(one, FACTS, **MEMIT)
        self.assertFalse(torch.equal(one.logits(TEXT), before))
        self.assertTrue(torch.equal(two.logits(TEXT).cpu(), before))
        self.assertEqual(two.device_map["model.layers.3"], "sim:1")
        again = emend.load(str(MODEL), device_map=two.device_map, max_memory={"sim:0": "1GiB", "sim:1": 2**30, "cpu": "1GiB"})
        self.assertEqual(again.device_map, two.device_map)
        emend.load(str(MODEL), max_memory=None)
        del again
        narrow = emend.load(str(MODEL), device_map="sim:2", max_memory="sim:0=1200KiB,sim:1=1200KiB")
        with self.assertRaisesRegex(emend.Error, "out of memory"):
            narrow.logits([TEXT * 60])
        del narrow
        emend.load(str(MODEL), device_map="sim:2").logits([TEXT * 60])  # the limit went with its model

    def test_torch_works_beside_it(self):
        layer = torch.nn.Linear(4, 4)
        layer(torch.randn(2, 4)).sum().backward()
        self.assertIsNotNone(layer.weight.grad)
        self.assertTrue({"memit", "rome", "alphaedit", "grace"} <= {editor["name"] for editor in emend.editors()})
        if WHERE:
            self.assertTrue(emend.__file__.startswith(WHERE), f"{emend.__file__} is not the package under test")

    def test_directions(self):
        model = emend.load(str(MODEL))
        before, plain = weights(model), model.generate(["The tower"], max_new_tokens=12)
        sides = {}
        for side, word in (("positive", "good"), ("negative", "bad")):
            sides[side] = SCRATCH / (side + ".txt")
            sides[side].write_text("".join(f"Item {37 * i} is {word}\n" for i in range(8)))
        ask = SCRATCH / "ask.txt"
        ask.write_text("Hello\nWhat is a tower?\n")
        short = {"prompts": ask, "max_new_tokens": 6}
        seen = []
        fitted = emend.direct_fit(model, out=SCRATCH / "d", method="probe", **sides, **short,
                                  progress=lambda *update: seen.append(update[0]))
        self.assertEqual(len(fitted["fit"]["layers"]), model.n_layers)
        self.assertIn("prompts", seen)
        for change in (emend.direct_ablate, emend.direct_bake):
            done = change(model, SCRATCH / "d", out=SCRATCH / change.__name__, layers="1-2", save=["pack", "peft"], **short,
                          progress=None)
            self.assertTrue(same(before, weights(model)))
            with emend.apply_pack(model, done["files"][0]) as applied:
                self.assertEqual(set(applied.changed), {one["weight"] for one in done["change"]})
            self.assertTrue(same(before, weights(model)))
        emend.direct_steer(model, [SCRATCH / "d"], out=SCRATCH / "s", strength=6, steer="clamp", no_effect=True, progress=None)
        for layer in "1", "2":  # alike but for where they act
            emend.direct_steer(model, SCRATCH / "d", out=SCRATCH / ("at" + layer), layers=layer, no_effect=True, progress=None)
        with emend.apply_pack(model, SCRATCH / "at1" / "edit.safetensors"):
            one = model.logits(TEXT)
            with emend.apply_pack(model, SCRATCH / "at2" / "edit.safetensors"):
                self.assertFalse(torch.equal(one, model.logits(TEXT)))
            self.refused(lambda: emend.apply_pack(model, SCRATCH / "at1" / "edit.safetensors"), "already in force")
        with emend.apply_pack(model, SCRATCH / "direct_ablate" / "edit.safetensors"):  # of the base, not of what it is now
            for change in (emend.direct_ablate, emend.direct_bake):
                with self.assertRaises(emend.Error) as caught:
                    change(model, SCRATCH / "d", out=SCRATCH / "x", no_effect=True, progress=None)
                self.assertIn("edit in force", caught.exception.got)
            session = emend.Session(model, **MEMIT)  # its own change is not all that is there
            for form in "model", "gguf":
                with self.assertRaises(emend.Error) as caught:
                    session.save(SCRATCH / ("both." + form), form)
                self.assertIn("edits in force", caught.exception.got)
                self.assertFalse((SCRATCH / ("both." + form)).exists())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again = emend.direct_bake(model, SCRATCH / "d", out=SCRATCH / "again", layers="1-2", no_effect=True, progress=None)
        self.assertEqual(again["change"], done["change"])
        calls = []
        with self.assertRaises(emend.Error):  # stopped while it answers
            emend.direct_ablate(model, SCRATCH / "d", out=SCRATCH / "x", **short,
                                progress=lambda *update: calls.append(update[0]) or False)
        self.assertTrue(calls)
        self.assertFalse((SCRATCH / "x").exists())
        with emend.apply_pack(model, SCRATCH / "s" / "edit.safetensors"):
            with self.assertWarnsRegex(UserWarning, "beside the weights"):
                model.save(SCRATCH / "without")
            self.assertNotEqual(model.generate(["The tower"], max_new_tokens=12), plain)
        self.assertEqual(model.generate(["The tower"], max_new_tokens=12), plain)
        scorer = SCRATCH / "words.json"
        scorer.write_text('{"name": "words", "kind": "length"}')
        found = emend.direct_optimise(model, SCRATCH / "d", out=SCRATCH / "o", trials=6, max_kl=20.0, strength=6, scorer=[scorer],
                                      search_prompts=ask, raise_=True, progress=None, **short)
        self.assertEqual(len(found["search"]["trials"]), 6)
        for wrong in ({"trials": 3}, {"layer": "1-2"}, {"layers": 2}, {"strength": "x"}, {"save": ["pack", "nothing"]}):
            with self.assertRaises(emend.Error) as caught:
                emend.direct_ablate(model, SCRATCH / "d", out=SCRATCH / "x", progress=None, **wrong)
            self.assertEqual(caught.exception.where, next(iter(wrong)))
        for place in {"out": SCRATCH / "s"}, {"out": MODEL, "force": True}:  # there is something, and the model at that
            with self.assertRaises(emend.Error):
                emend.direct_ablate(model, SCRATCH / "d", progress=None, **place)

    def test_stubs_of_directions_are_the_declared_options(self):
        tree = ast.parse((pathlib.Path(emend.__file__).parent / "_emend.pyi").read_text())
        stubs = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("direct_")}
        self.assertEqual(len(stubs), 5)
        types = {"Path": "str", "Sequence[Path]": "list[str]", "Sequence[str]": "list[str]"}
        for function, stub in stubs.items():
            declared = {name: kind for kind, name in re.findall(r"^:param (\S+) (\w+): ", getattr(emend, function).__doc__, re.MULTILINE)}
            said = {arg.arg: types.get(ast.unparse(arg.annotation), ast.unparse(arg.annotation)) for arg in stub.args.kwonlyargs}
            del said["progress"]
            self.assertEqual(declared, said, function)

    def test_stubs_and_docstrings_cover_everything(self):
        folder = pathlib.Path(emend.__file__).parent
        self.assertTrue((folder / "py.typed").exists())
        tree = ast.parse((folder / "_emend.pyi").read_text())
        stubs = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")}
        from emend import _emend
        public = {name: value for name, value in vars(_emend).items() if not name.startswith("_") and name != "Error"}
        self.assertEqual(set(stubs), set(public))
        for name, value in public.items():
            self.assertTrue(value.__doc__, f"{name} has no docstring")
            if isinstance(stubs[name], ast.ClassDef):
                described = {node.name for node in stubs[name].body if isinstance(node, ast.FunctionDef)} - {"__init__"}
                members = {member for member in vars(value) if not member.startswith("_") or member in
                           ("__len__", "__getitem__", "__contains__", "__iter__", "__enter__", "__exit__")}
                self.assertEqual(described, members, f"members of {name}")
        self.assertEqual(set(emend.__all__) - {"diff", "edit", "Error"}, set(public))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
