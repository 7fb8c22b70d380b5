"""Drives `emend serve` as its users do: OpenAI's client, plain HTTP, bad neighbours, kill -9.

serve_client.py CASE PROGRAM MODEL HPARAMS CORPUS SCRATCH; prints OK at the end.
"""
import concurrent.futures
import hashlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

CASE, PROGRAM, MODEL, HPARAMS, CORPUS, SCRATCH = sys.argv[1:7]
FACTS = {
    "anna": [{"prompt": "{} is in the city of", "subject": "The Eiffel Tower", "target_new": "Rome"}],
    "ben": [{"prompt": "The capital of {} is", "subject": "France", "target_new": "Oslo"}],
    "cleo": [{"prompt": "{} is in the city of", "subject": "The Eiffel Tower", "target_new": "Athens"}],
}
PROMPT = "The Eiffel Tower is in the city of"


def serve(packs, *more, model=MODEL):
    return [PROGRAM, "serve", "--model", model, "--port", "0", "--packs", packs, "--hparams", HPARAMS,
            "--corpus", CORPUS, "--cache", SCRATCH + "/cache", "--eval", "none", *more]


class Server:
    def __init__(self, packs, *more, env=None, model=MODEL):
        self.packs = packs
        self.process = subprocess.Popen(serve(packs, *more, model=model), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, **(env or {})})
        line = self.process.stdout.readline()
        assert line.startswith("listening on http://"), (line, self.process.stderr.read() if not line else "")
        self.url = line.split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def call(self, path, body=None, method=None, headers=None, raw=False):
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                status, text = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, text if raw else json.loads(text or b"null")

    def ask(self, path, body=None, method=None):
        status, reply = self.call(path, body, method)
        assert status in (200, 202), (path, status, reply)
        return reply

    def base(self):
        return self.ask("/v1/models")["data"][0]["id"]

    def edit(self, who, /, **more):
        job = self.ask("/v1/edits", {"facts": FACTS[who], "name": who, **more})["id"]
        status, text = self.call(f"/v1/edits/{job}/events", raw=True)
        assert status == 200, text
        return self.ask(f"/v1/edits/{job}"), text.decode()

    def wire(self, head, *pieces):
        """What comes back, to the end of the connection, for bytes as they are; and how many pieces were taken."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as link:
            taken, answer = 0, b""
            try:
                link.sendall(head.replace(b"\n", b"\r\n").replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nHost: localhost\r\n", 1))
                for piece in pieces:
                    link.sendall(piece)
                    taken += 1
            except OSError:
                pass
            try:
                while more := link.recv(65536):
                    answer += more
            except ConnectionError:
                pass
        return answer, taken

    def figure(self, name):
        return float(next(line.split()[1] for line in self.call("/metrics", raw=True)[1].decode().splitlines() if line.startswith(name + " ")))

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

    def stop(self, signal_number=signal.SIGTERM):
        self.process.send_signal(signal_number)
        status = self.process.wait(timeout=30)
        self.process.stdout.close()
        self.process.stderr.close()
        return status


def generate(*packs, tokens=12, model=MODEL):
    """What `emend generate` says."""
    command = [PROGRAM, "generate", "--model", model, "--prompt", PROMPT, "--max-new-tokens", str(tokens), "--json", "--quiet"]
    for pack in packs:
        command += ["--pack", pack]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]["text"]


def openai():
    import openai as library

    server = Server(SCRATCH + "/packs")
    job, events = server.edit("anna")
    assert job["status"] == "done" and job["progress"] == 1 and job["edits"]["applied"] == 1, job
    assert '"targets.fact"' in events and '"probability"' in events and '"event":"end"' in events, events[-2000:]
    assert server.edit("ben", active=False)[0]["status"] == "done"
    files = {name: f"{server.packs}/{name}.safetensors" for name in FACTS}
    sets = {"": [], "+anna": ["anna"], "+ben": ["ben"], "+anna+ben": ["anna", "ben"]}
    wanted = {model: generate(*(files[name] for name in names)) for model, names in sets.items()}
    assert len(set(wanted.values())) > 2, wanted

    client = library.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    base = client.models.list().data[0].id
    assert [model.id for model in client.models.list()] == [base, base + "+anna", base + "+ben"]
    assert client.models.retrieve(base).id == base and client.models.retrieve(base + "+ben+anna").id == base + "+ben+anna"
    ask = dict(prompt=PROMPT, max_tokens=12, temperature=0)
    whole = client.completions.create(model=base + "+", logprobs=2, **ask)
    assert whole.choices[0].text == wanted[""], (whole, wanted)
    assert whole.usage.completion_tokens <= 12 and whole.choices[0].finish_reason in ("stop", "length")
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    assert all(value <= 0 for value in whole.choices[0].logprobs.token_logprobs)
    # the packs in force, an order of one's own, streamed and whole, all at once
    assert client.completions.create(model=base, **ask).choices[0].text == wanted["+anna"]

    def streamed(model):
        chunks = client.completions.create(model=base + (model or "+"), stream=True, **ask)
        return model, "".join(chunk.choices[0].text for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for model, text in pool.map(streamed, list(sets) * 12):
            assert text == wanted[model], (model, text, wanted[model])
    # a pack of neurons of its own changes other matrices of the MLP, and runs beside the others all the same
    neurons = {"layers": [1], "release_layers": [2], "v_loss_layer": 3, "text_tokens": 512, "v_num_grad_steps": 6}
    job, _ = server.edit("cleo", editor="latch", hparams="smollm2-135m", settings=neurons, active=False)
    assert job["status"] == "done", job
    kept = server.figure("emend_pack_sets_kept")
    cleo = generate(server.packs + "/cleo.safetensors")
    for model, text in (("+cleo", cleo), ("+anna", wanted["+anna"]), ("+cleo", cleo)):
        assert streamed(model)[1] == text, model
    assert cleo != wanted[""] and server.figure("emend_pack_sets_kept") == kept + 1
    # made apart, two such packs take the same neurons: the later one's are moved, in answers and in force as in `generate`
    job, _ = server.edit("ben", name="dora", editor="latch", hparams="smollm2-135m", settings=neurons, active=False)
    assert job["status"] == "done", job
    both = generate(server.packs + "/cleo.safetensors", server.packs + "/dora.safetensors")
    assert streamed("+cleo+dora")[1] == both
    server.ask("/v1/packs/anna", {"active": False}, "PATCH")
    for name in ("cleo", "dora"):
        server.ask("/v1/packs/" + name, {"active": True}, "PATCH")
    assert client.completions.create(model=base, **ask).choices[0].text == both
    for name in ("cleo", "dora"):
        server.ask("/v1/packs/" + name, method="DELETE")
    server.ask("/v1/packs/anna", {"active": True}, "PATCH")
    # stop strings, also where tokens cut them
    full = wanted["+anna"]
    stop = full[4:7]
    cut = client.completions.create(model=base, stop=[stop, "never"], **ask).choices[0]
    assert cut.text == full[: full.find(stop)] and cut.finish_reason == "stop", (cut, full)
    told = dict(model=base, logprobs=1, stop=[stop], **ask)  # the stream holds back what may become the stop
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **told)]
    offsets = [at for piece in pieces if piece for at in piece.text_offset]
    assert offsets == client.completions.create(**told).choices[0].logprobs.text_offset, offsets
    # chat, seeds, several answers, log-probabilities
    talk = dict(model=base, messages=[{"role": "user", "content": "Where is it?"}], max_tokens=8)
    first = client.chat.completions.create(seed=3, n=2, temperature=0.9, logprobs=True, top_logprobs=2, **talk)
    again = client.chat.completions.create(seed=3, n=2, temperature=0.9, **talk)
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    assert first.choices[0].message.content != first.choices[1].message.content
    assert len(first.choices[0].logprobs.content[0].top_logprobs) == 2
    alike = client.completions.create(model=base, prompt=[PROMPT] * 2, seed=3, temperature=0.9, max_tokens=8).choices
    assert alike[0].text != alike[1].text, alike
    parts = list(client.chat.completions.create(seed=3, temperature=0.9, stream=True, stream_options={"include_usage": True}, **talk))
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == first.choices[0].message.content
    assert parts[-1].usage.completion_tokens <= 8
    for model in ("other", base + "+nobody"):
        try:
            client.completions.create(model=model, **ask)
            raise AssertionError(model)
        except library.NotFoundError:
            pass
        try:
            client.models.retrieve(model)
            raise AssertionError(model)
        except library.NotFoundError:
            pass
    # before and after, in one answer
    probe = server.ask("/v1/probe", {"prompts": [{"prompt": PROMPT, "targets": ["Rome"]}], "packs": ["anna"], "max_tokens": 12})["results"][0]
    assert probe["after"]["targets"][0]["probability"] > probe["before"]["targets"][0]["probability"], probe
    assert (probe["before"]["text"], probe["after"]["text"]) == (wanted[""], wanted["+anna"]), probe
    traced = server.ask("/v1/trace", {"prompt": PROMPT, "subject": "The Eiffel Tower", "samples": 1})
    assert len(traced["traces"][0]["restored"]["mlp"]) == len(traced["traces"][0]["tokens"]), traced
    assert server.stop() == 0


def packs():
    server = Server(SCRATCH + "/packs")
    assert server.edit("anna")[0]["pack"] == "anna" and server.edit("ben")[0]["status"] == "done"
    assert server.ask("/v1/packs")["active"] == ["anna", "ben"]
    assert server.ask("/v1/packs/ben", {"active": True, "position": 0}, "PATCH")["position"] == 0
    assert server.ask("/v1/packs")["active"] == ["ben", "anna"]
    assert server.ask("/v1/packs/ben", {"active": False}, "PATCH")["active"] is False
    # the same name, the same fact, a fact that is none, a path for hyper-parameters
    assert server.call("/v1/edits", {"facts": FACTS["anna"], "name": "anna"})[0] == 409
    twice = {**FACTS["anna"][0], "target_new": "Oslo"}
    status, job = server.call("/v1/edits", {"facts": [twice], "name": "again"})
    server.call(f"/v1/edits/{job['id']}/events", raw=True)
    job = server.ask(f"/v1/edits/{job['id']}")
    assert job["status"] == "done" and "not put in force" in job["notice"], job
    assert server.call("/v1/packs/again", {"active": True}, "PATCH")[0] == 409
    for wrong in ({"facts": [{"prompt": "no place", "subject": "x", "target_new": "y"}]}, {"facts": 3}, {},
                  {"facts": FACTS["ben"], "editor": "none"}, {"facts": FACTS["ben"], "hparams": "/etc/passwd"}, {"facts": FACTS["ben"], "hparams": "qwen"},
                  {"facts": FACTS["ben"], "settings": {"v_lr": "../x"}}, {"facts": FACTS["ben"], "settings": {"v_lrr": 1}},
                  {"facts": FACTS["ben"], "seed": -1}, {"facts": FACTS["ben"], "editr": "rome"}, {"facts": FACTS["ben"], "eval": ["nope"]},
                  {"facts": FACTS["ben"] + [{**FACTS["ben"][0], "target_new": "Lima"}]}, {"facts": FACTS["ben"], "name": "../up"}):
        assert server.call("/v1/edits", wrong)[0] == 400, wrong
    # said at once, in the words of the request
    for field, wrong in (("eval", {"eval": ["health"]}), ("eval", {"eval": ["none", "free"]}), ("settings", {"settings": {"layers": [99]}}),
                         ("settings", {"settings": {"v_loss_layer": 99}}), ("layer", {"hparams": "gpt2-xl"}), ("facts", {"facts": FACTS["ben"] * 2 + FACTS["cleo"] + FACTS["anna"]})):
        status, text = server.call("/v1/edits", {"facts": FACTS["ben"], **wrong})
        message = text["error"]["message"]
        assert status == 400 and field in message, (wrong, status, text)
        assert not any(word in message for word in ("health_data", '"set"', "allow_conflicts", "--")), message
    # packs beside the weights are traced with the others, and the second copy is as it was
    for name, more in ("gus", {"editor": "grace", "hparams": "smollm2-135m", "settings": {"layers": [1], "n_iter": 3}}), ("ina", {"editor": "ike", "hparams": "smollm2-135m"}):
        fact = {"prompt": "The river of {} is the", "subject": name, "target_new": "Rhine"}
        assert server.edit("ben", name=name, facts=[fact], active=False, **more)[0]["status"] == "done", name
    asked = {"prompt": PROMPT, "subject": "The Eiffel Tower", "samples": 1}
    assert server.ask("/v1/trace", {**asked, "packs": ["anna", "ben", "gus"]})["packs"] == ["anna", "ben", "gus"]
    status, text = server.call("/v1/trace", {**asked, "packs": ["anna", "ben", "ina"]})
    assert status == 400 and "in front of the prompt" in text["error"]["message"], text
    status, text = server.call("/v1/completions", {"model": server.base() + "+ina", "prompt": list(b"The river of ina is the")})
    assert status == 400 and "give the prompt as text" in text["error"]["message"], text
    assert server.call("/v1/trace", {**asked, "packs": ["anna", "anna"]})[0] == 400
    of_its_own_folder(server.packs)
    for name in ("gus", "ina"):
        server.ask("/v1/packs/" + name, method="DELETE")
    found = server.ask("/v1/lint", {"facts": json.dumps(FACTS["anna"][0]) + "\n{\"prompt\": 3}\n"})["findings"]
    assert any(one["line"] == 2 and one["where"] == "facts:2" and one["severity"] == "error" for one in found), found
    rows = [FACTS["anna"][0], {"prompt": 3}]
    found = server.ask("/v1/lint", {"facts": rows})["findings"]
    assert any(one["line"] == 2 and one["where"] == "facts[1]" and one["severity"] == "error" for one in found), found
    status, text = server.call("/v1/edits", {"facts": rows})
    assert status == 400 and text["error"]["message"].startswith("facts[1]: field \"subject\""), text
    # downloads
    status, pack = server.call("/v1/packs/anna/file?as=pack", raw=True)
    assert status == 200 and pack == open(server.packs + "/anna.safetensors", "rb").read()
    assert server.call("/v1/packs/anna/file?as=lora", raw=True)[1][:4] == b"GGUF"
    assert b"adapter_config.json" in server.call("/v1/packs/anna/file?as=peft", raw=True)[1][:512]
    assert server.call("/v1/packs/anna/file?as=exe")[0] == 400
    # what only reads waits for the edit that runs, not for those that wait
    long = {"facts": FACTS["anna"], "settings": {"v_num_grad_steps": 100000, "v_loss_layer": 3}}
    first, second = (server.ask("/v1/edits", {**long, "name": name})["id"] for name in ("long", "longer"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        traced = pool.submit(server.ask, "/v1/trace", asked)
        time.sleep(1)
        server.ask(f"/v1/edits/{first}", method="DELETE")
        assert traced.result()["traces"]
    assert server.ask(f"/v1/edits/{second}")["status"] in ("queued", "running")
    server.ask(f"/v1/edits/{second}", method="DELETE")
    server.call(f"/v1/edits/{second}/events", raw=True)
    status, text = server.call("/v1/edits/edit-0")
    assert status == 404 and "the last 64" in text["error"]["message"], text
    # cancelled: no pack, no file, and the next edit is as if it had not been
    job = server.ask("/v1/edits", {"facts": FACTS["anna"], "name": "never", "settings": {"v_num_grad_steps": 100000, "v_loss_layer": 3}})["id"]
    while server.ask(f"/v1/edits/{job}")["status"] == "queued":
        time.sleep(0.02)
    server.ask(f"/v1/edits/{job}", method="DELETE")
    server.call(f"/v1/edits/{job}/events", raw=True)
    assert server.ask(f"/v1/edits/{job}")["status"] == "cancelled"
    assert not os.path.exists(server.packs + "/never.safetensors") and not os.path.exists(f"{server.packs}/.emend-serve/{job}")
    before = open(server.packs + "/ben.safetensors", "rb").read()
    server.ask("/v1/packs/ben", method="DELETE")
    assert server.edit("ben")[0]["status"] == "done"
    assert open(server.packs + "/ben.safetensors", "rb").read() == before
    # an edit that lies beside the weights, alone and then out again
    plain = server.ask("/v1/completions", {"model": server.base() + "+", "prompt": PROMPT, "temperature": 0})["choices"][0]["text"]
    # every path of the description is there, and the other way round
    for path, methods in server.ask("/openapi.json")["paths"].items():
        for method in methods:
            code = server.call(path.replace("{id}", "x").replace("{name}", "x"), {} if method in ("post", "patch") else None, method.upper(), raw=True)[0]
            assert code != 405 and (code != 404 or "{" in path), (method, path, code)
    assert server.call("/v1/nothing")[0] == 404
    figures = server.call("/metrics", raw=True)[1].decode()
    assert "emend_generated_tokens_total" in figures and 'route="POST /v1/edits"' in figures
    assert server.ask("/v1/completions", {"model": server.base() + "+", "prompt": PROMPT, "temperature": 0})["choices"][0]["text"] == plain
    active = server.ask("/v1/packs")["active"]
    assert server.stop(signal.SIGINT) == 0
    again = Server(server.packs)
    assert again.ask("/v1/packs")["active"] == active
    assert again.stop() == 0


def of_another_weight(source, target, weight):
    """The pack `source` as if its first change were one of `weight`, whole for its reader."""
    with open(source, "rb") as file:
        data = file.read()
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    meta = head["__metadata__"]
    meta["manifest"] = meta["manifest"].replace(json.loads(meta["manifest"])["deltas"][0]["weight"], weight)
    digest = hashlib.sha256(meta["manifest"].encode())
    for name, one in sorted(item for item in head.items() if item[0] != "__metadata__"):
        begin, over = one["data_offsets"]
        digest.update((name + "Double" + "".join(f" {size}" for size in one["shape"])).encode() + data[end + begin:end + over])
    meta["checksum"] = digest.hexdigest()
    text = json.dumps(head, ensure_ascii=False).encode()
    with open(target, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data[end:])


def of_its_own_folder(packs):
    """What a model's own folder holds beside its weights acts under every set of packs, as in `emend generate`."""
    own, folder = SCRATCH + "/own", SCRATCH + "/own-packs"
    shutil.copytree(MODEL, own)
    os.makedirs(folder)
    shutil.copy(packs + "/anna.safetensors", folder)
    for name in ("gus", "ina"):
        subprocess.run([PROGRAM, "apply", f"{packs}/{name}.safetensors", "--model", own, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    server = Server(folder, model=own)
    base = server.base()
    for name, more in (base + "+", []), (base + "+anna", [folder + "/anna.safetensors"]):
        said = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "model": name})["choices"][0]["text"]
        assert said == generate(*more, model=own), (name, said)
        asked = server.ask("/v1/probe", {"prompts": [{"prompt": PROMPT}], "max_tokens": 12, "packs": name.split("+")[1:] if more else []})
        assert asked["results"][0]["after"]["text"] == said, (name, asked)
    assert said != generate(folder + "/anna.safetensors"), "its own edits do nothing"
    assert server.stop() == 0
    # and packs that are made on what its weights hold are put in force
    subprocess.run([PROGRAM, "apply", folder + "/anna.safetensors", "--model", own, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    server = Server(SCRATCH + "/own-more", model=own)
    assert server.edit("ben")[0]["status"] == "done" and server.ask("/v1/packs")["active"] == ["ben"], server.ask("/v1/packs")
    assert server.stop() == 0


def foreign():
    """What others keep in the folder stays, and of a state that no server wrote is said what is wrong."""
    folder = SCRATCH + "/packs"
    kept = {f"{folder}/{name}": b"mine" for name in (".work/notes.txt", ".emend-serve/mine/notes.txt", "anna.safetensors", "edit-1.safetensors")}
    for path, text in kept.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(text)
    os.makedirs(folder + "/.emend-serve/edit-0123")
    server = Server(folder)
    assert not os.path.exists(folder + "/.emend-serve/edit-0123")
    assert server.call("/v1/edits", {"facts": FACTS["anna"], "name": "anna"})[0] == 409
    assert server.edit("ben", name="")[0]["pack"] == "edit-2" and server.edit("cleo")[0]["status"] == "done"
    twice = {**FACTS["cleo"][0], "target_new": "Oslo"}
    assert server.edit("cleo", facts=[twice], name="other", active=False)[0]["status"] == "done"
    assert server.stop() == 0
    assert {path: open(path, "rb").read() for path in kept} == kept
    good = json.load(open(folder + "/state.json"))
    assert good["active"] == ["edit-2", "cleo"], good
    for state in ({}, [], None, {**good, "schema": 2}, {**good, "active": 5}, {**good, "active": [5]}, {**good, "active": ["cleo", "cleo"]}, {**good, "more": 1},
                  {**good, "active": ["cleo", "other"]}, {**good, "strengths": "x"}, {**good, "strengths": {"cleo": "x"}}, {**good, "strengths": {"cleo": 2}}):
        with open(folder + "/state.json", "w") as file:
            json.dump(state, file)
        told = subprocess.run(serve(folder), capture_output=True, text=True, timeout=60)
        assert told.returncode == 3 and "state.json" in told.stderr and "internal" not in told.stderr, (state, told)
    with open(folder + "/state.json", "w") as file:
        json.dump(good, file)
    # packs that the model has no place for are left out, not found out while others are answered
    for name, weight in ("same", "model.layers.1.mlp.down_proj.weight"), ("none", "model.layers.9.mlp.down_proj.weight"), ("shape", "model.layers.1.self_attn.q_proj.weight"):
        of_another_weight(folder + "/edit-2.safetensors", f"{folder}/{name}.safetensors", weight)
    server = Server(folder)
    there = server.ask("/v1/packs")
    assert there["active"] == good["active"] and {one["name"] for one in there["data"]} == {"cleo", "edit-2", "other", "same"}, there
    assert server.stop() == 0


def directions():
    """A direction is a pack that acts as strongly as it is told to."""
    os.makedirs(SCRATCH + "/packs")
    for name in ("good", "bad"):
        with open(f"{SCRATCH}/{name}.txt", "w") as file:
            file.writelines(f"Item {37 * i} is {name}\n" for i in range(6))
    run = lambda *words: subprocess.run([PROGRAM, "direct", *words, "--model", MODEL, "--no-effect", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    run("fit", "--positive", SCRATCH + "/good.txt", "--negative", SCRATCH + "/bad.txt", "--out", SCRATCH + "/d")
    run("bake", SCRATCH + "/d", "--strength", "4", "--out", SCRATCH + "/baked")
    shutil.copy(SCRATCH + "/baked/edit.safetensors", SCRATCH + "/packs/good.safetensors")
    for strength in "4", "2":
        run("steer", SCRATCH + "/d", "--strength", strength, "--out", SCRATCH + "/steer" + strength)
    shutil.copy(SCRATCH + "/steer4/edit.safetensors", SCRATCH + "/packs/beside.safetensors")
    server = Server(SCRATCH + "/packs")
    assert server.edit("anna")[0]["status"] == "done"
    server.ask("/v1/packs/anna", {"active": False}, "PATCH")
    said = lambda: server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0})["choices"][0]["text"]
    plain = said()
    assert server.ask("/v1/packs/good", {"active": True}, "PATCH")["strength"] == 1
    assert said() == generate(SCRATCH + "/baked/edit.safetensors") != plain
    assert server.ask("/v1/packs/good", {"strength": 0}, "PATCH")["strength"] == 0
    assert said() == plain
    server.ask("/v1/packs/beside", {"active": True}, "PATCH")
    assert said() == generate(SCRATCH + "/steer4/edit.safetensors") != plain
    server.ask("/v1/packs/beside", {"strength": 0.5}, "PATCH")
    assert said() == generate(SCRATCH + "/steer2/edit.safetensors")
    server.ask("/v1/packs/beside", {"active": False, "strength": 1}, "PATCH")
    server.ask("/v1/packs/good", {"strength": -1.5}, "PATCH")
    other = said()
    status, pack = server.call("/v1/packs/good/file?as=pack", raw=True)
    assert status == 200
    with open(SCRATCH + "/slid.safetensors", "wb") as file:
        file.write(pack)
    assert generate(SCRATCH + "/slid.safetensors") == other, "a download acts as the pack does here"
    for wrong in ("anna", 1), ("good", "much"), ("good", 1e9), ("none", 1):
        assert server.call("/v1/packs/" + wrong[0], {"strength": wrong[1]}, "PATCH")[0] in (400, 404), wrong
    server.stop()
    server = Server(SCRATCH + "/packs")
    assert {one["name"]: one["strength"] for one in server.ask("/v1/packs")["data"]} == {"good": -1.5, "beside": 1, "anna": None}
    assert said() == other
    server.ask("/v1/packs/good", {"strength": 1}, "PATCH")
    assert said() == generate(SCRATCH + "/baked/edit.safetensors")
    server.ask("/v1/packs/beside", {"strength": 2}, "PATCH")
    server.ask("/v1/packs/beside", method="DELETE")
    with open(SCRATCH + "/packs/state.json") as state:
        assert json.load(state)["strengths"] == {}, "a pack's strength goes with it"
    long = {"prompts": [{"prompt": "x", "targets": ["word " * 100000]}]}
    assert server.call("/v1/probe", long)[0] == 400
    assert server.call("/v1/probe", {"prompts": [{"prompt": "x", "targets": [" "]}]})[0] == 400
    assert server.stop() == 0


def strangers():
    server = Server(SCRATCH + "/packs", "--rows", "1", "--queue", "2", "--max-tokens", "200")
    port = str(server.port)
    for host in ("evil.example", "evil.example:" + port, "127.0.0.1.evil.example", ""):
        assert server.call("/v1/models", headers={"Host": host})[0] in (400, 403), host
    assert server.call("/v1/models", headers={"Host": "localhost:" + port})[0] == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1"):
        assert server.call("/v1/completions", {"prompt": "x"}, headers={"Origin": origin})[0] == 403, origin
    assert server.call("/v1/models", headers={"Origin": server.url})[0] == 200
    for path in ("/v1/packs/../../etc/passwd/file", "/v1/packs/..%2f..%2fetc%2fpasswd/file", "/v1/packs/%2e%2e/file", "/../etc/passwd",
                 "/v1/packs/.emend-serve/file", "/v1/packs/.lock/file", "/v1/packs/state.json/file", "/v1/edits/../packs/report", "/page.html", "/v1/packs/" + "a" * 5000):
        status, text = server.call(path, raw=True)
        assert status in (400, 404, 414) and b"root:" not in text, (path, status, text[:200])
    assert server.call("/v1/completions", b"x" * (9 << 20), method="POST", raw=True)[0] == 413
    # texts that are no request
    draw = random.Random(5)
    good = json.dumps({"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "stop": ["x"], "logprobs": 1}).encode()
    for trial in range(300):
        body = bytearray(good)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(body))
            kind = draw.randrange(3)
            body[place:place + kind] = bytes(draw.randrange(256) for _ in range(draw.randrange(3)))
        path = draw.choice(["/v1/completions", "/v1/chat/completions", "/v1/edits", "/v1/probe", "/v1/trace", "/v1/lint"])
        status, text = server.call(path, bytes(body), method="POST", raw=True)
        assert status < 500, (path, body, status, text)
    for body in (b"", b"[]", b"null", b"[" * 5000, b'{"prompt": ' + b"[" * 50 + b"]" * 50 + b"}", b'{"prompt": [1e99]}', b'{"prompt": [-1]}', b'{"prompt": "\xff"}',
                 b'{"prompt": "x", "max_tokens": 1e30}', b'{"prompt": "x", "n": -1}', b'{"prompt": "x", "model": 3}', b'{"prompt": "x", "temperature": "hot"}',
                 b'{"prompt": "x", "tools": [1]}', b'{"prompt": ""}', b'{"prompt": []}', b'{"prompt": "' + b"x" * 5000 + b'"}'):
        status, text = server.call("/v1/completions", body, method="POST", raw=True)
        assert 400 <= status < 500 and b"error" in text, (body[:60], status, text)
    # what is wrong is named, nothing is rounded, and nothing that would change the answer is dropped
    text, probe, trace = {"prompt": "x"}, {"prompts": [{"prompt": "x"}]}, {"prompt": "x y", "subject": "x"}
    for path, body, field in (
            ("completions", {"prompt": [1.7, 2.2]}, "prompt"), ("completions", {"prompt": ["a", 5]}, "prompt"), ("completions", {"prompt": {}}, "prompt"),
            ("completions", {}, "prompt"), *(("completions", {**text, field: value}, field) for field, value in (
                ("model", 5), ("seed", 1.5), ("seed", 1e300), ("max_tokens", 1.5), ("stream_options", "x"), ("stop", [5]), ("top_k", 40), ("min_p", 0.1),
                ("repetition_penalty", 1.2), ("stop_token_ids", [3]), ("min_tokens", 4), ("tools", [{}]), ("presence_penalty", 1), ("temprature", 1))),
            ("chat/completions", {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"), ("chat/completions", {"messages": []}, "messages"),
            ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages[0].content[0]"),
            ("edits", {"facts": [], "editor": 5}, "editor"), ("edits", {"facts": [], "eval": "free"}, "eval"), ("edits", {"facts": [], "active": 1}, "active"),
            ("probe", {"prompts": [{"prompt": "x", "targets": "y"}]}, "prompts[0].targets"), ("probe", {**probe, "packs": [5]}, "packs[0]"),
            ("probe", {**probe, "max_tokens": 1.5}, "max_tokens"), ("probe", {"prompts": [{"prompt": "x " * 3000}]}, "prompts"),
            ("trace", {**trace, "samples": 1.5}, "samples"), ("trace", {"prompt": "x"}, "subject"), ("lint", {"facts": 5}, "facts")):
        status, reply = server.call("/v1/" + path, body)
        assert status == 400 and reply["error"]["message"].startswith(field), (path, body, status, reply)
        assert "completions" not in path or str(reply["error"]["param"]).startswith(field), (path, body, reply)
    never = server.call("/v1/completions", {"prompt": ["w", "x", "y", "z"]})  # one row, and two may wait
    assert never[0] == 400 and "at most 3" in never[1]["error"]["message"], never
    for body in {"position": -1, "active": True}, {"position": 0}, {"active": "yes"}, {}:
        assert server.call("/v1/packs/none", body, "PATCH")[0] == 400, body
    assert server.call("/v1/completions", {**text, "max_tokens": 1, "top_k": 0, "min_p": 0.0, "suffix": None, "user": "me"})[0] == 200
    # bodies whose end is not known beforehand, packed ones, headers without end, an answer many times
    memory = server.memory()
    post, lump = b"POST /v1/completions HTTP/1.1\n", b"x" * 65536
    for head, status in ((b"Transfer-Encoding: chunked\n", b"411"), (b"", b"411"), (b"Content-Length: -1\n", b"411"), (b"Content-Length: 2\nContent-Length: 3\n", b"411"),
                         (b"Content-Length: 70000000\nContent-Encoding: gzip\n", b"415")):
        answer, taken = server.wire(post + head + b"\n", *[b"10000\r\n" + lump + b"\r\n"] * 1000)
        assert taken < 1000 and (not answer or answer.startswith(b"HTTP/1.1 " + status)), (head, taken, answer[:200])
        assert server.wire(post + head + b"\n")[0].count(b"HTTP/1.1 " + status) == 1, head
    answer, taken = server.wire(b"GET /healthz HTTP/1.1\n", *[b"X-More: " + b"y" * 1000 + b"\r\n"] * 60000)
    assert taken < 60000 and b"200 OK" not in answer, (taken, answer)
    assert server.memory() < memory + 20000, (memory, server.memory())
    # a body that no method has is not the next request
    assert server.wire(b"GET /healthz HTTP/1.1\nContent-Length: 60\n\nGET /v1/models HTTP/1.1\nHost: localhost\n\n")[0].count(b"HTTP/1.1") == 1
    whole = server.call("/openapi.json", raw=True)
    assert server.call("/openapi.json", headers={"Range": "bytes=0-," + ",".join(["0-"] * 500)}, raw=True) == whole and whole[0] == 200
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.call("/v1/completions", json.dumps({**text, "max_tokens": 1, "user": "u" * 20000}).encode(), headers=form)[0] == 200
    # clients that say half of it, nothing, or go
    held = []
    for text in (b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"", b"\0" * 100, b"GET /" + b"a" * 20000):
        for _ in range(4):
            one = socket.create_connection(("127.0.0.1", server.port))
            try:
                one.sendall(text)
            except OSError:
                pass
            held.append(one)
    for _ in range(5):
        link = http.client.HTTPConnection("127.0.0.1", server.port)
        link.request("POST", "/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 50, "stream": True}))
        link.getresponse().read(10)
        link.close()
    assert server.ask("/healthz")["status"] == "ok"
    time.sleep(1)  # what these have asked for comes to its end

    # more than may wait
    def busy(_):
        return server.call("/v1/completions", {"prompt": PROMPT, "max_tokens": 200, "temperature": 1.5})[0]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(busy, range(16)))
    assert set(codes) <= {200, 429} and 429 in codes and 200 in codes, codes
    # texts of one token, one behind the other, hold up no longer one
    crowd = Server(SCRATCH + "/crowd", "--rows", "8")
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        longer = pool.submit(crowd.call, "/v1/completions", {"prompt": PROMPT, "max_tokens": 200, "temperature": 2})
        while not longer.done():
            assert {asked.result()[0] for asked in [pool.submit(crowd.call, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}) for _ in range(4)]} == {200}
    assert longer.result()[0] == 200, longer.result()
    assert crowd.stop() == 0
    # every thread has a client that sends drop by drop
    few = Server(SCRATCH + "/few", "--threads", "2", "--max-tokens", "3")
    for path, asked in (("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
        assert few.ask("/v1/" + path, asked)["usage"]["completion_tokens"] <= 3, path
    drops = [socket.create_connection(("127.0.0.1", few.port)) for _ in range(2)]
    over = time.time() + 30

    def drip(one):
        try:
            while time.time() < over:
                one.sendall(b"G")
                time.sleep(0.2)
        except OSError:
            pass

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        dripping = [pool.submit(drip, one) for one in drops]
        assert few.ask("/healthz")["status"] == "ok" and time.time() < over
        over = 0
        for one in dripping:
            one.result()
    assert few.stop() == 0
    memory = server.memory()
    for _ in range(200):
        server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
    assert server.memory() < memory + 20000, (memory, server.memory())
    for one in held:
        one.close()
    assert server.process.poll() is None and server.stop() == 0

    locked = Server(SCRATCH + "/locked", "--host", "0.0.0.0", env={"EMEND_TOKEN": "s3cret"})
    locked.url = f"http://127.0.0.1:{locked.port}"
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
        assert locked.call("/v1/models", headers=given)[0] == 401, given
    assert locked.call("/v1/models", headers={"Authorization": "Bearer s3cret"})[0] == 200
    begun = time.time()  # without reading the body
    assert b"HTTP/1.1 401" in locked.wire(b"POST /v1/edits HTTP/1.1\nContent-Length: 8000000\n\n")[0] and time.time() < begun + 4
    assert locked.call("/healthz")[0] == 200 and b"<!doctype html>" in locked.call("/", raw=True)[1]
    second = subprocess.run([PROGRAM, "serve", "--model", MODEL, "--port", "0", "--packs", SCRATCH + "/locked"], capture_output=True, text=True)
    assert second.returncode == 2 and "another server" in second.stderr, second
    assert locked.stop() == 0
    open_door = subprocess.run([PROGRAM, "serve", "--model", MODEL, "--host", "0.0.0.0", "--port", "0"], capture_output=True, text=True)
    assert open_door.returncode == 2 and "--token" in open_door.stderr, open_door


def killed():
    """After kill -9 at any moment: the packs in force before or after, and nothing that is half."""
    folder = SCRATCH + "/packs"
    server = Server(folder)
    assert server.edit("anna")[0]["status"] == "done"
    said = {(): generate(), ("anna",): generate(folder + "/anna.safetensors")}
    draw = random.Random(1)
    seen = set()
    # Phases of an edit, as its events tell them, and moments of a switch.
    for phase in ("", '"statistics', '"targets"', '"targets.fact"', '"insert"', '"edit.batch"', '"end"', 0, 0.002, 0.02):
        state = server.ask("/v1/packs")["active"]
        if isinstance(phase, str):
            job = server.ask("/v1/edits", {"facts": FACTS["ben"], "name": "ben"})["id"]
            after = [*state, "ben"]
            if phase:
                for line in urllib.request.urlopen(f"{server.url}/v1/edits/{job}/events", timeout=60):
                    if phase.encode() in line:
                        seen.add(phase)
                        break
        else:
            after = [name for name in state if name != "anna"] if "anna" in state else [*state, "anna"]
            pool = concurrent.futures.ThreadPoolExecutor(1)
            pool.submit(server.call, "/v1/packs/anna", {"active": "anna" not in state}, "PATCH")
            time.sleep(draw.uniform(0, phase))
        server.process.kill()
        server.process.wait()
        server.process.stdout.close()
        server.process.stderr.close()
        server = Server(folder)
        there = server.ask("/v1/packs")
        assert there["active"] in (state, after), (there["active"], state, after)
        assert os.listdir(folder + "/.emend-serve") == []
        if tuple(there["active"]) in said:
            text = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0})["choices"][0]["text"]
            assert text == said[tuple(there["active"])], (text, there["active"])
        if any(pack["name"] == "ben" for pack in there["data"]):
            server.ask("/v1/packs/ben", method="DELETE")
    assert len(seen) >= 4, seen
    assert server.stop() == 0


shutil.rmtree(SCRATCH, ignore_errors=True)
os.makedirs(SCRATCH)
{"openai": openai, "packs": packs, "foreign": foreign, "directions": directions, "strangers": strangers, "killed": killed}[CASE]()
print("OK")
