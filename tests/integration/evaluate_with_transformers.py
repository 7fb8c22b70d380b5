"""Knowledge-editing metrics a second time, with transformers and numpy, straight from the published definitions.

Simple on purpose: one padded batch a record for CounterFact and for what is written on a record's prompts, one prompt a
predicted token for zsRE, one text at a time for the rest. counterfact_transformers_test compares emend's figures with what this prints.

  evaluate_with_transformers.py MODEL DATA CHANGED.safetensors COUNTS.json > out.json

MODEL: a Hugging Face folder. DATA: folder with counterfact_full.json, zsre_mend_eval.json, counterfact_easyedit.json,
knowedit_wiki_recent.json, mquake_hard.json, lambada_openai_test.jsonl, wikitext2_valid.txt, health_piqa.json.
CHANGED: weights that turn the model into the "edited" one. COUNTS: {"counterfact": records, "zsre": records,
"easyedit": records, "knowedit": records, "mquake": instances, "lambada": texts, "perplexity": tokens, "choices": items}.
"""
import json
import math
import re
import sys
import time
import unicodedata

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_grad_enabled(False)
model_dir, data_dir, changed_file, counts_file = sys.argv[1:5]
tokenizer = AutoTokenizer.from_pretrained(model_dir)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
counts = json.load(open(counts_file))


def ids_of(text):
    return tokenizer(text)["input_ids"]


def logits_of(rows):
    """Logits of a right-padded batch."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return model(input_ids=ids, attention_mask=mask).logits


def read(path):
    return json.load(open(f"{data_dir}/{path}", encoding="utf-8"))


def mean(values):
    return None if len(values) == 0 else float(np.mean(values))


def percent(values):
    values = [v for v in values if v is not None]
    return None if not values else 100 * float(np.mean(values))


# CounterFact (eval_utils_counterfact.py): both targets of every prompt in one batch; the mean over a target's tokens of
# -log p, and whether every token of the right one is the argmax.
def score_pairs(prompts, new, true):
    rows = [ids_of(f"{prompt} {target}") for prompt in prompts for target in (new, true)]
    targets = {0: ids_of(f" {new}"), 1: ids_of(f" {true}")}
    logits = logits_of(rows)
    nll = np.zeros((len(prompts), 2))
    right = np.zeros((len(prompts), 2), dtype=bool)
    for i in range(len(rows)):
        begin, target = len(ids_of(prompts[i // 2])), targets[i % 2]
        hits = []
        for j, token in enumerate(target):
            row = torch.log_softmax(logits[i, begin + j - 1], dim=0)
            nll[i // 2, i % 2] += -row[token].item() / len(target)
            hits.append(row.argmax().item() == token)
        right[i // 2, i % 2] = all(hits)
    return nll, right


def counterfact(records, cases):
    columns = {}
    for record in records:
        cases.append({})
        rewrite = record["requested_rewrite"]
        new, true = rewrite["target_new"]["str"], rewrite["target_true"]["str"]
        kinds = {
            "efficacy": [rewrite["prompt"].format(rewrite["subject"])],
            "paraphrase": record["paraphrase_prompts"],
            "neighborhood": record["neighborhood_prompts"],
        }
        for kind, prompts in kinds.items():
            nll, right = score_pairs(prompts, new, true)
            name = {"efficacy": "rewrite", "paraphrase": "paraphrase", "neighborhood": "neighborhood"}[kind] + "_prompts"
            cases[-1][name + "_probs"] = [{"target_new": a, "target_true": b} for a, b in nll.tolist()]
            cases[-1][name + "_correct"] = right[:, 1 if kind == "neighborhood" else 0].tolist()
            sign = -1 if kind == "neighborhood" else 1
            columns.setdefault(kind + "_success", []).append(mean(sign * (nll[:, 1] - nll[:, 0]) > 0))
            columns.setdefault(kind + "_magnitude", []).append(mean(sign * (np.exp(-nll[:, 0]) - np.exp(-nll[:, 1]))))
            columns.setdefault(kind + "_accuracy", []).append(mean(right[:, 1 if kind == "neighborhood" else 0]))
    out = {key: percent(values) for key, values in columns.items()}
    rates = [out["efficacy_success"], out["paraphrase_success"], out["neighborhood_success"]]
    out["score"] = 0 if min(rates) == 0 else 3 / sum(1 / rate for rate in rates)
    return out


# zsRE (eval_utils_zsre.py): a target of T tokens becomes T prompts, each with the decoded tokens before it.
def expanded_accuracy(prompt, target):
    tokens = ids_of(f" {target}")
    prompts = [prompt + tokenizer.decode(tokens[:i]) for i in range(len(tokens))]
    labels = [ids_of(tokenizer.decode(token))[0] for token in tokens]
    rows = [ids_of(text) for text in prompts]
    logits = logits_of(rows)
    return [int(logits[i, len(row) - 1].argmax().item() == labels[i]) for i, row in enumerate(rows)]


def zsre(records):
    efficacy, paraphrase, neighborhood = [], [], []
    for record in records:
        target = record["answers"][0]
        efficacy.append(mean(expanded_accuracy(record["src"], target)))
        paraphrase.append(mean(expanded_accuracy(record["rephrase"], target)))
        neighborhood.append(mean(expanded_accuracy(record["loc"] + "?", record["loc_ans"])))
    out = {"efficacy_accuracy": percent(efficacy), "paraphrase_accuracy": percent(paraphrase), "neighborhood_accuracy": percent(neighborhood)}
    out["score"] = 0 if min(out.values()) == 0 else 3 / sum(1 / value for value in out.values())
    return out


# EasyEdit (evaluate_utils.py), teacher forcing.
def teacher_forced(prompt, target):
    """Predicted ids at the target's positions, and the ids that stand there."""
    row, begin = ids_of(f"{prompt} {target}"), len(ids_of(prompt))
    predicted = logits_of([row])[0].argmax(-1).tolist()
    return predicted[begin - 1 : len(row) - 1], row[begin:]


def token_accuracy(prompt, target):
    predicted, labels = teacher_forced(prompt, target)
    return mean(np.equal(predicted, labels))


def first_text(answer):
    while isinstance(answer, list):
        answer = next((a for a in answer if a), "")
    return answer.strip()


def probes_of(record, key):
    out = {}
    for name, probes in (record.get(key) or {}).items():
        kept = [(p["prompt"], first_text(p["ground_truth"])) for p in probes if p["prompt"].strip() and first_text(p["ground_truth"])]
        if kept:
            out[name] = kept
    return out


def with_easyedit_keys(record):
    """EasyEdit's flat rows in the nested form of KnowEdit."""
    out = dict(record)
    if record.get("locality_prompt"):
        probe = {"prompt": record["locality_prompt"], "ground_truth": record["locality_ground_truth"]}
        out["locality"] = {"neighborhood": [probe]}
    return out


def easyedit(records, before):
    """`before` maps record, key and prompt to predictions of the unedited model; empty: they are collected into it."""
    first, columns = not before, {}
    for i, record in enumerate(map(with_easyedit_keys, records)):
        columns.setdefault("rewrite_acc", []).append(token_accuracy(record["prompt"], record["target_new"]))
        if record.get("rephrase_prompt"):
            columns.setdefault("rephrase_acc", []).append(token_accuracy(record["rephrase_prompt"], record["target_new"]))
        for key, probes in probes_of(record, "portability").items():
            columns.setdefault(f"portability.{key}_acc", []).append(mean([token_accuracy(*probe) for probe in probes]))
        for key, probes in probes_of(record, "locality").items():
            same = []
            for n, probe in enumerate(probes):
                predicted, _ = teacher_forced(*probe)
                if first:
                    before[(i, key, n)] = predicted
                else:
                    same.append(mean(np.equal(predicted, before[(i, key, n)])))
            if not first:
                columns.setdefault(f"locality.{key}_acc", []).append(mean(same))
    return {key: percent(values) for key, values in columns.items()}


# MQuAKE by greedy decoding: edited statements alone, everything else behind examples and up to a line break.
STATEMENTS = """The capital of France is Paris
The author of Hamlet is William Shakespeare
The official language of Brazil is Portuguese
The Eiffel Tower is located in the city of Paris
Albert Einstein was born in the city of Ulm
The chief executive officer of Tesla is Elon Musk
Basketball was created in the country of United States of America
Kenya is located in the continent of Africa
"""
QUESTIONS = """Q: What is the capital of the country where the Colosseum stands?
A: Rome
Q: In which language did the author of Don Quixote write?
A: Spanish
Q: On which continent lies the country whose capital is Nairobi?
A: Africa
Q: Who is the author of the novel in which Captain Ahab appears?
A: Herman Melville
Q: What is the official language of the country where Mozart was born?
A: German
Q: In which city are the headquarters of the company that makes the iPhone?
A: Cupertino
Q: What is the currency of the country in which Mount Fuji is located?
A: yen
Q: Which religion is followed by the head of the Catholic Church?
A: Christianity
"""


decoded = {}


def greedy(prompt, tokens):
    """Ids that greedy decoding writes; a longer continuation of the same prompt by the same weights is used again."""
    known = decoded.get(prompt, [])
    if len(known) >= tokens:
        return known[:tokens]
    ids = torch.tensor([ids_of(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    decoded[prompt] = out[0, ids.shape[1] :].tolist()
    return decoded[prompt]


def says(prompt, answers):
    """Whether greedy decoding writes one of the answers and a line break."""
    longest = max(len(ids_of(f" {answer}\n")) for answer in answers)
    line, end, _ = tokenizer.decode(greedy(prompt, longest + 1)).partition("\n")
    return bool(end) and line in {f" {answer}" for answer in answers}


def mquake(records):
    edit_wise, groups = [], []
    for record in records:
        edited = {}
        for edit in record["requested_rewrite"]:
            prompt, target = edit["prompt"].format(edit["subject"]), edit["target_new"]["str"]
            wanted = ids_of(f" {target}")
            edited[prompt] = greedy(prompt, len(wanted)) == wanted
            edit_wise.append(edited[prompt])
        hops = []
        for hop in record["new_single_hops"]:
            known = edited.get(hop["cloze"])
            hops.append(says(STATEMENTS + hop["cloze"], [hop["answer"], *hop["answer_alias"]]) if known is None else known)
        asked = [f"{QUESTIONS}Q: {question}\nA:" for question in record["questions"]]
        groups.append({
            "hops": hops,
            "questions": [says(prompt, [record["new_answer"], *record["new_answer_alias"]]) for prompt in asked],
            "old_questions": [says(prompt, [record["answer"], *record["answer_alias"]]) for prompt in asked],
        })
    summary = {
        "edit_wise": percent(edit_wise),
        "instance_wise": percent([all(group["hops"]) for group in groups]),
        "multi_hop": percent([any(group["questions"]) for group in groups]),
        "multi_hop_old": percent([any(group["old_questions"]) for group in groups]),
    }
    return summary, groups


# What the model writes: greedy, to the end of the sentence, 40 tokens at most; read as normalised words.
FOREIGN = (
    "The ferry left the harbour a little after six, when the fog had begun to lift. Two men on the upper deck argued "
    "about the price of timber, and a child counted the gulls that followed the boat. Nobody looked back at the town."
)


TITLES = ("Mr", "Mrs", "Ms", "Dr", "St", "Mt", "Prof")


def sentence_ended(text, names):
    inside = [re.escape(name[:at]) for name in names for at, mark in enumerate(name[:-1]) if at and mark in ".?!"]
    text = re.sub(rf"(?i)\b({'|'.join(inside)})[.?!]", r"\1", text) if inside else text
    if "\n" in text.lstrip():
        return True
    for match in re.finditer(r"[.?!]", text):
        word = re.search(r"(\w*)$", text[: match.start()]).group(1)
        if match.start() == 0 or (match.group() == "." and (len(word) == 1 and word.isupper() or word in TITLES)):
            continue
        if re.match(r"[\"')\]]*(\s|$)", text[match.end() :]):
            return True
    return False


def continuations(rows, stop=None):
    """What greedy decoding writes behind each of the rows, 40 tokens at most; the batch is padded on the left."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
        mask[i, width - len(row) :] = 1

    def text_of(row):
        return tokenizer.decode(row[width:], skip_special_tokens=True)

    def stopped(rows, scores, **_):
        return torch.tensor([stop(text_of(row), i) for i, row in enumerate(rows)])

    out = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False, pad_token_id=0,
                         stopping_criteria=[stopped] if stop else None)
    return [text_of(row) for row in out]


def write_on(prompts, names):
    """Of each prompt the text up to where its sentence has ended, and no token more. `names`: those known in each text.
    Behind the dot of "3." the next token tells whether it is that of "3.14"."""
    texts = continuations([ids_of(prompt) for prompt in prompts],
                          lambda text, i: sentence_ended(text, names[i]) and not re.search(r"\d\.$", text))
    return [re.sub(r"(\d\.)\s[^.]*$", r"\1", text) if sentence_ended(text, names[i]) else text for i, text in enumerate(texts)]


def words_of(text):
    plain = re.sub(r"\s+", " ", unicodedata.normalize("NFKD", text).lower())
    return re.sub(r"^[^\w]+|[^\w]+$", "", plain)


def without_article(words):
    return re.sub(r"^(the|a|an) (?=.)", "", words)


def place_of(text, answer):
    found = re.search(r"(?<!\w)" + re.escape(without_article(words_of(answer))) + r"(?!\w)", words_of(text))
    return found.start() if found else None


def last_sentence(text, subject):
    begin = 0
    for end in range(1, len(text)):
        if (text[end].isspace() or text[end - 1] == "\n") and sentence_ended(text[begin:end], [subject]) and text[end:].strip():
            begin = end
    return text[:begin].strip(), text[begin:].strip()


def message_of(text, subject):
    front, sentence = last_sentence(text, subject)
    if text.endswith("?"):
        return text
    return (f"{front}\n\n" if front else "") + f"Complete the sentence: {sentence}"


def chat_answers(messages):
    turns = [[{"role": "user", "content": message}] for message in messages]
    return continuations([tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"] for one in turns])


def read_chat(text, sentence, subject, new, old):
    """What an answer repeats is left out: the sentence in front of its beginning, the subject where names are looked for."""
    words, repeated = words_of(text), without_article(words_of(sentence))
    found = re.search(r"(?<!\w)" + re.escape(repeated) + r"(?!\w)", words)
    said = without_article(words_of(words[found.end() :] if found else words))
    around = without_article(words_of(subject))

    def place(answer):
        wanted = without_article(words_of(answer))
        inside = [m.span() for m in re.finditer(r"(?<!\w)" + re.escape(around) + r"(?!\w)", words)] if len(around) > len(wanted) else []
        spots = [m.start() for m in re.finditer(r"(?<!\w)" + re.escape(wanted) + r"(?!\w)", words)]
        return next((at for at in spots if not any(a <= at and at + len(wanted) <= b for a, b in inside)), None)

    first, other = place(new), place(old) if old else None
    begins = re.match(re.escape(without_article(words_of(new))) + r"(?!\w)", said) is not None
    return {"text": text, "begins": begins, "names": first is not None and (other is None or first <= other)}


def portability_of(record, new):
    """Prompts and answers: the fact under another name of its subject, and a question that follows from it."""
    alias, question = record.get("alternative_subject"), record.get("portability")
    renamed = [(record["requested_rewrite"]["prompt"].format(alias), new)] if alias else []
    return renamed + ([(question["New Question"], question["New Answer"])] if question else [])


def free_chat(record, prompt, subject, new, old, before):
    """`before`: the texts of the neighbours, by the unedited model."""
    probes = portability_of(record, new)
    asked = {
        "edit": [(prompt, prompt)],
        "paraphrase": [(one, one) for one in record["paraphrase_prompts"][:2]],
        "question": [(f"{prompt} what?", prompt)],
        "prefixed": [(f"{FOREIGN} {prompt}", prompt)],
        "negation": [(f"It is not true that {prompt}",) * 2],
        "doubt": [(f"I doubt that {prompt}",) * 2],
        "portability": [(one, one) for one, _ in probes],
        "neighbor": [(one, one) for one in record["neighborhood_prompts"][:3]],
    }
    case = {}
    messages = {group: [message_of(text, subject) for text, _ in pairs] for group, pairs in asked.items()}
    answers = iter(chat_answers([message for group in messages.values() for message in group]))
    for group, pairs in asked.items():
        for n, (_, repeated) in enumerate(pairs):
            message, answer = messages[group][n], next(answers)
            if group == "neighbor":
                entry = {"prompt": message, "text": answer}
                if n in before:
                    entry["text_kept"] = before[n] == answer
                before.setdefault(n, answer)
            else:
                right, wrong = (probes[n][1], None) if group == "portability" else (new, old)
                entry = {"prompt": message, **read_chat(answer, last_sentence(repeated, subject)[1], subject, right, wrong)}
            case.setdefault(f"{group}_chat", []).append(entry)
    return case


def free(records, before):
    cases = []
    for i, record in enumerate(records):
        rewrite = record["requested_rewrite"]
        prompt, new, old = rewrite["prompt"].format(rewrite["subject"]), rewrite["target_new"]["str"], rewrite["target_true"]["str"]
        asked = {
            "edit": [prompt],
            "paraphrase": record["paraphrase_prompts"][:2],
            "question": [f"Question: {prompt} what?\nAnswer:"],
            "prefixed": [f"{FOREIGN} {prompt}"],
            "negation": [f"It is not true that {prompt}"],
            "doubt": [f"I doubt that {prompt}"],
        }
        case = {}
        probes = portability_of(record, new)
        plain = [(one, (new, old)) for prompts in asked.values() for one in prompts]
        plain += [(f"Question: {one}\nAnswer:" if one.endswith("?") else one, (answer,)) for one, answer in probes]
        texts = iter(write_on(*zip(*plain)))
        for group, prompts in asked.items():
            for text in (next(texts) for _ in prompts):
                found, other = place_of(text, new), place_of(text, old)
                begin = re.match(re.escape(without_article(words_of(new))) + r"(?!\w)", without_article(words_of(text)))
                named = found is not None and (other is None or found <= other)
                case.setdefault(group, []).append({"text": text, "begins": begin is not None, "names": named})
        own, said = (words_of(words_of(case[group][0]["text"]).split(" ")[0]) for group in ("edit", "negation"))
        case["negation"][0]["repeats"] = own == said
        for _, answer in probes:
            text = next(texts)
            case.setdefault("portability", []).append({"text": text, "names": place_of(text, answer) is not None})
        case.update(free_chat(record, prompt, rewrite["subject"], new, old, before.setdefault(("chat", i), {})))
        for n, neighbor in enumerate(record["neighborhood_prompts"][:3]):
            ids = greedy(neighbor, 10)
            log_p = torch.log_softmax(logits_of([ids_of(neighbor)])[0, -1].double(), dim=-1)
            entry = {"ids": ids}
            if (i, n) in before:
                ids_before, log_p_before = before[i, n]
                entry |= {"first_kept": ids[:1] == ids_before[:1], "ten_kept": ids == ids_before}
                entry["kl"] = (log_p_before.exp() * (log_p_before - log_p)).sum().item()
            else:
                before[i, n] = (ids, log_p)
            case.setdefault("neighbor", []).append(entry)
        cases.append(case)
    return cases


def lambada(texts):
    right, nll = [], []
    for text in texts:
        prompt, word = text.rsplit(" ", 1)
        row, begin = ids_of(text), len(ids_of(prompt))
        log_probs = torch.log_softmax(logits_of([row])[0].double(), dim=-1)
        nll.append(-sum(log_probs[i - 1, row[i]].item() for i in range(begin, len(row))))
        right.append(all(log_probs[i - 1].argmax().item() == row[i] for i in range(begin, len(row))))
    return {"accuracy": percent(right), "perplexity": math.exp(np.mean(nll))}


def perplexity(text, length, tokens):
    ids = ids_of(text)[:tokens]
    total, n = 0.0, 0
    for at in range(0, len(ids), length):
        row = torch.tensor(ids[at : at + length])
        if len(row) < 2:
            continue
        log_probs = torch.log_softmax(model(input_ids=row[None]).logits[0].double(), dim=-1)
        total -= log_probs[torch.arange(len(row) - 1), row[1:]].sum().item()
        n += len(row) - 1
    return {"perplexity": math.exp(total / n), "tokens": n}


def piqa(records):
    right = []
    for record in records:
        sums = []
        for option in (record["sol1"], record["sol2"]):
            prompt = f"Question: {record['goal']}\nAnswer:"
            row, begin = ids_of(f"{prompt} {option}"), len(ids_of(prompt))
            log_probs = torch.log_softmax(logits_of([row])[0].double(), dim=-1)
            sums.append(sum(log_probs[i - 1, row[i]].item() for i in range(begin, len(row))))
        right.append(int(np.argmax(sums)) == record["label"])
    return percent(right)


def everything(before):
    text = open(f"{data_dir}/wikitext2_valid.txt", encoding="utf-8").read()
    lines = [json.loads(line)["text"] for line in open(f"{data_dir}/lambada_openai_test.jsonl", encoding="utf-8")]
    cases, out = [], {}

    def put(name, value):
        out[name] = value
        print(f"{time.process_time():6.1f} s of processor time until {name}", file=sys.stderr)

    multi_hop, groups = mquake(read("mquake_hard.json")[: counts["mquake"]])
    put("mquake", multi_hop)
    put("mquake_groups", groups)
    put("counterfact", counterfact(read("counterfact_full.json")[: counts["counterfact"]], cases))
    put("counterfact_cases", cases)
    put("free_cases", free(read("counterfact_full.json")[: counts["counterfact"]], before.setdefault("free", {})))
    put("zsre", zsre(read("zsre_mend_eval.json")[: counts["zsre"]]))
    flat, nested = before.setdefault("easyedit", {}), before.setdefault("knowedit", {})
    put("easyedit", easyedit(read("counterfact_easyedit.json")[: counts["easyedit"]], flat))
    put("knowedit", easyedit(read("knowedit_wiki_recent.json")[: counts["knowedit"]], nested))
    put("lambada", lambada(lines[: counts["lambada"]]))
    put("perplexity", perplexity(text[:200000], 512, counts["perplexity"]))
    put("piqa", piqa(read("health_piqa.json")[: counts["choices"]]))
    return out


predictions = {}
result = {"before": everything(predictions)}
model.load_state_dict(load_file(changed_file), strict=False)
decoded.clear()
result["after"] = everything(predictions)
json.dump(result, sys.stdout)
