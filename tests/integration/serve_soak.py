"""Longer proofs about `emend serve` than a test run has time for; docs/serve.md has the figures.

serve_soak.py switch|load|beside|flood PROGRAM MODEL PACK_A PACK_B [SECONDS | URL of another server, for beside]
  switch   how long until an answer comes from other packs; 1,000 switches leave every weight as it was
  load     1 and 16 clients with four sets of packs: no error, no mixture, and how much more they get together
  beside   time to first token and tokens a second beside another OpenAI-compatible server of the same model
  flood    10,000 connections, slow, half-closed and endless ones: others are served, memory stays
"""
import concurrent.futures
import hashlib
import http.client
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

CASE, PROGRAM, MODEL, *PACKS = sys.argv[1:6]
MORE = sys.argv[6] if len(sys.argv) > 6 else None
PROMPTS = ["The Eiffel Tower is in the city of", "My favourite recipe needs", "In 1969 the first man on the moon", "Water boils at",
           "The mother tongue of Danielle Darrieux is", "Once upon a time there was a", "The capital of France is", "A good way to learn a language is"]
NEW = 32


class Server:
    def __init__(self, *more):
        self.folder = tempfile.mkdtemp()
        for name, path in zip("ab", PACKS):
            shutil.copy(path, f"{self.folder}/{name}.safetensors")
        self.process = subprocess.Popen([PROGRAM, "serve", "--model", MODEL, "--port", "0", "--packs", self.folder, *more],
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1])
        self.base = self.ask("GET", "/v1/models")["data"][0]["id"]
        for name in "ab":
            self.ask("PATCH", "/v1/packs/" + name, {"active": False})

    def ask(self, method, path, body=None, raw=False):
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        link.request(method, path, json.dumps(body) if body is not None else None)
        reply = link.getresponse()
        text = reply.read()
        link.close()
        assert reply.status == 200, (path, reply.status, text[:500])
        return text if raw else json.loads(text)

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) >> 10

    def end(self):
        self.process.terminate()
        assert self.process.wait(60) == 0
        shutil.rmtree(self.folder)


def said(*packs):
    command = [PROGRAM, "generate", "--model", MODEL, "--max-new-tokens", str(NEW), "--json", "--quiet"]
    for prompt in PROMPTS:
        command += ["--prompt", prompt]
    for pack in packs:
        command += ["--pack", pack]
    return [one["text"] for one in json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)]


def percentiles(values):
    values = values if len(values) > 1 else values * 2
    cut = statistics.quantiles(values, n=20)
    return f"median {1e3 * statistics.median(values):.1f} ms, 95 % {1e3 * cut[18]:.1f} ms, most {1e3 * max(values):.1f} ms"


def switch():
    server = Server()

    def one(model="", **more):
        begin = time.time()
        reply = server.ask("POST", "/v1/completions", {"model": server.base + model, "prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0, **more})
        return time.time() - begin, reply["choices"][0]

    def weights():  # log-probabilities of every token with all digits, and every byte of a file made from the weights
        texts = [one("+", prompt=prompt, max_tokens=24, logprobs=20)[1] for prompt in PROMPTS]
        return hashlib.sha256(json.dumps(texts).encode() + server.ask("GET", "/v1/packs/b/file?as=gguf", raw=True)).hexdigest()

    for _ in range(5):
        one("+")
    plain = [one("+")[0] for _ in range(20)]
    print("one token, nothing switched:", percentiles(plain))
    begin = time.time()
    server.ask("PATCH", "/v1/packs/a", {"active": True})
    patched = time.time() - begin
    first, _ = one()
    print(f"first switch to a pack: PATCH {1e3 * patched:.1f} ms; next answer's first token {1e3 * (first - statistics.median(plain)):.1f} ms later than without")
    before, took = weights(), []
    for number in range(1000):
        begin = time.time()
        server.ask("PATCH", "/v1/packs/" + "ab"[number % 2], {"active": number % 4 > 1})
        took.append(time.time() - begin)
        if number % 10 == 0:
            one()
        if number % 10 == 5:  # puts packs into the weights themselves and takes them out
            server.ask("POST", "/v1/probe", {"prompts": [{"prompt": PROMPTS[0]}], "packs": ["ab"[number // 10 % 2]], "max_tokens": 1})
    print("1,000 switches:", percentiles(took))
    assert weights() == before
    print("weights as before:", before)
    server.end()


class Load:
    """Clients that ask one after the other for `seconds`, each answer compared with what it has to be."""

    def __init__(self, port, models, wanted=None):
        self.port, self.models, self.wanted = port, models, wanted

    def client(self, number):
        draw = random.Random(number)
        while time.time() < self.end:
            link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            which, prompt = draw.randrange(len(self.models)), draw.randrange(len(PROMPTS))
            begin, text, tokens, first = time.time(), "", 0, None
            link.request("POST", "/v1/completions", json.dumps({"model": self.models[which], "prompt": PROMPTS[prompt], "max_tokens": NEW, "temperature": 0, "stream": True,
                                                               "stream_options": {"include_usage": True}}), {"Content-Type": "application/json"})
            reply = link.getresponse()
            assert reply.status == 200, reply.read()
            for line in reply:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    if event["choices"] and event["choices"][0]["text"]:
                        first = first or time.time() - begin
                        text += event["choices"][0]["text"]
                    tokens = (event.get("usage") or {}).get("completion_tokens") or tokens
            with self.lock:
                self.firsts.append(first or 0)
                self.tokens += tokens
                self.answers += 1
                if self.wanted and text != self.wanted[which][prompt]:
                    self.wrong.append((self.models[which], prompt, text, self.wanted[which][prompt]))
            link.close()

    def run(self, clients, seconds):
        self.lock, self.firsts, self.tokens, self.answers, self.wrong = threading.Lock(), [], 0, 0, []
        begin = time.time()
        self.end = begin + seconds
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            list(pool.map(self.client, range(clients)))  # raises what a client raised
        assert not self.wrong, (len(self.wrong), self.wrong[:3])
        rate = self.tokens / (time.time() - begin)
        print(f"{clients:2} clients: {self.answers} answers, {rate:.1f} tokens/s, first token {percentiles(self.firsts)}", flush=True)
        return rate, statistics.median(self.firsts)


def load():
    seconds = float(MORE or 60)
    sets = {"+": [], "+a": [PACKS[0]], "+b": [PACKS[1]], "+b+a": [PACKS[1], PACKS[0]]}
    try:
        wanted = [said(*packs) for packs in sets.values()]
    except subprocess.CalledProcessError:  # the two do not go together
        sets.pop("+b+a")
        wanted = [said(*packs) for packs in sets.values()]
    print("different texts:", len({tuple(texts) for texts in wanted}), "of", len(wanted))
    server = Server()
    work = Load(server.port, [server.base + name for name in sets], wanted)
    for clients in (1, 16):
        work.run(clients, 3)
    one = [work.run(1, seconds / 4)[0]]
    many = work.run(16, seconds)[0]
    one.append(work.run(1, seconds / 4)[0])
    print(f"16 clients get {many / statistics.mean(one):.2f} times what one gets; {server.memory()} MiB")
    server.end()


def beside():
    server = Server()
    port = int(MORE.rsplit(":", 1)[1])
    ours, theirs = Load(server.port, [server.base + "+"]), Load(port, ["any"])
    for clients in (1, 8):
        for work in (ours, theirs):
            work.run(clients, 3)
        rounds = [(ours.run(clients, 10), theirs.run(clients, 10)) for _ in range(3)]
        rate, first = (statistics.median(a[i] / b[i] for a, b in rounds) for i in (0, 1))
        print(f"{clients} clients: {rate:.2f} of its tokens a second, {first:.2f} times its time to first token")
    server.end()


def flood():
    server, count = Server(), int(MORE or 10000)
    kinds = [b"", b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
             b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"pro", b"\0" * 100, b"GET /" + b"a" * 20000]
    good, done = [], threading.Event()

    def honest():
        while not done.is_set():
            begin = time.time()
            server.ask("POST", "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 1})
            good.append(time.time() - begin)

    for _ in range(2):  # each with all of them at once
        thread = threading.Thread(target=honest)
        thread.start()
        held, end = [], time.time() + 20
        while len(held) < count or time.time() < end:
            if len(held) == count:
                time.sleep(0.5)
                continue
            link = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            held.append(link)
            try:
                link.sendall(kinds[len(held) % len(kinds)])
                if len(held) % 3 == 0:
                    link.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        for link in held:
            link.close()
        done.set()
        thread.join()
        done.clear()
        print(f"{count} connections at once: {len(good)} honest requests answered, {percentiles(good)}; {server.memory()} MiB, "
              f"{len(os.listdir(f'/proc/{server.process.pid}/fd'))} descriptors", flush=True)
        good.clear()
    sizes = []
    for _ in range(10):
        for _ in range(200):
            server.ask("POST", "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 2})
        sizes.append(server.memory())
    print("memory after each 200 requests, MiB:", *sizes)
    assert sizes[-1] <= sizes[3] + 8
    server.end()


{"switch": switch, "load": load, "beside": beside, "flood": flood}[CASE]()
print("OK")
